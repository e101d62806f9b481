"""Runs matmul kernels as a 64-bit Arm CPU would, by QEMU, on any machine that has the tools."""

from __future__ import annotations

import shutil
import subprocess
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from llvmlite import binding as llvm
from other_cpu import other_cpu
from specexec_kernels import cpu_jit, cpu_matmul_plan
from specexec_kernels.cpu_matmul import stored
from specexec_kernels.cpu_matmul_plan import plan_for
from specexec_kernels.cpu_matmul_spec import CHUNKS, OUT, X_SUMS, X
from specexec_kernels.formats.base import PackedWeight
from torch import Tensor

_LINKER, _QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
needs_arm = pytest.mark.skipif(
    not (shutil.which(_LINKER) and shutil.which(_QEMU)), reason=f"needs {_LINKER} and {_QEMU}"
)
# Reads memory from the standard input, makes the addresses in it absolute, calls both kernels with
# their arguments, and writes the memory to the standard output.
_HARNESS = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
void arrange(int64_t *), matmul(int64_t *);
int main(void) {
  int64_t head[4];
  if (fread(head, 8, 4, stdin) != 4) return 1;
  int64_t *places = malloc(8 * head[1]);
  char *memory = aligned_alloc(64, head[0]);
  if (fread(places, 8, head[1], stdin) != head[1]) return 2;
  if (fread(memory, 1, head[0], stdin) != head[0]) return 3;
  for (int64_t i = 0; i < head[1]; i++) *(int64_t *)(memory + places[i]) += (int64_t)memory;
  arrange((int64_t *)(memory + head[2]));
  matmul((int64_t *)(memory + head[3]));
  return fwrite(memory, 1, head[0], stdout) != head[0];
}
"""


class Arm:
    """An Arm CPU with NEON and dot products of bytes, and none of bfloat16.

    Attributes:
        instructions: by which products of bytes were compiled so far.
    """

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, quads: Literal["sdot", "smmla"] = "sdot"
    ) -> None:
        """Has kernels chosen for it until `patch` is undone.

        Args:
            folder: where programs are kept.
            quads: the instruction that it multiplies bytes by.
        """
        other_cpu(patch, lanes=4, matmul=False, dot=False, quads=quads)
        self.instructions: set[str] = set()
        self._features = "+i8mm" if quads == "smmla" else ""
        patch.setattr(cpu_jit, "has_int16", lambda: False)
        patch.setattr(cpu_jit, "has_tiles", lambda: False)
        patch.setattr(cpu_jit, "compiled", self._compiled)
        for made in (cpu_matmul_plan._kernel, cpu_matmul_plan._arrange_kernel):
            patch.setattr(cpu_matmul_plan, made.__name__, made.__wrapped__)
        self._folder = folder
        (folder / "harness.c").write_text(_HARNESS)

    def matmul(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """See cpu_matmul.matmul."""
        plan = plan_for(x.dtype, len(x), weight)
        assert plan is not None
        assert not plan.scratch()
        chunks = -(-len(x) // plan.rows)
        x, (items, totals), sums = x.to(plan.dtype), plan.arranged(chunks), plan.sums(chunks)
        memory = _Memory()
        at = {name: memory.put(each) for name, each in
              {"x": x, "items": items, "totals": totals, "sums": sums}.items()}  # fmt: skip
        arrange = memory.table([0, at["x"], *x.shape, at["items"], at["totals"], chunks], (1, 4, 5))
        given = list(plan.arguments)
        addresses = {X: at["items"], X_SUMS: at["totals"], OUT: at["sums"]}
        addresses |= {place: memory.put(each) for place, each in stored(weight).items()}
        for place, value in {**addresses, CHUNKS: chunks}.items():
            given[place] = value
        matmul = memory.table(given, addresses)
        program = self._linked(plan.arrange_kernel.object, plan.kernel.object)
        after = memory.run(program, arrange, matmul)
        found = after[at["sums"] : at["sums"] + 4 * sums.numel()]
        return plan.flat(torch.frombuffer(bytearray(found), dtype=torch.float32).view(sums.shape))[
            : len(x)
        ]

    def _compiled(self, kind: str, told: Any, build: Callable[[str], str]) -> Any:
        if kind == "matmul":
            _, spec = told
            self.instructions.add(spec.quads)
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple("aarch64-linux-gnu")
        machine = target.create_target_machine(
            cpu="neoverse-n1", features=self._features, opt=3, reloc="pic"
        )
        module = llvm.parse_assembly(build(kind))
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        return SimpleNamespace(object=machine.emit_object(module), address=0)

    def _linked(self, *objects: bytes) -> Path:
        names = [self._folder / f"{number}.o" for number in range(len(objects))]
        for name, content in zip(names, objects, strict=True):
            name.write_bytes(content)
        program = self._folder / "program"
        harness = self._folder / "harness.c"
        subprocess.run([_LINKER, "-static", "-O1", "-o", program, harness, *names], check=True)
        return program


class _Memory:
    """What the kernels read and write, with addresses counted from its begin."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._addresses: list[int] = []

    def put(self, tensor: Tensor) -> int:
        self._bytes += bytes(-len(self._bytes) % 64)
        at = len(self._bytes)
        self._bytes += tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return at

    def table(self, values: list[int], addresses: Mapping[int, int] | tuple[int, ...]) -> int:
        at = self.put(torch.tensor(values, dtype=torch.int64))
        self._addresses += (at + 8 * place for place in addresses)
        return at

    def run(self, program: Path, arrange: int, matmul: int) -> bytes:
        self._bytes += bytes(-len(self._bytes) % 64)
        head = array("q", (len(self._bytes), len(self._addresses), arrange, matmul))
        given = bytes(head) + bytes(array("q", self._addresses)) + bytes(self._bytes)
        return subprocess.run(
            [_QEMU, "-cpu", "max", program], input=given, capture_output=True, check=True
        ).stdout
