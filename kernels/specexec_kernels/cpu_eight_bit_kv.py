"""Unpacks keys and values in 8 bits on a CPU: eight_bit_kv.py has the form, and the reference.

PyTorch takes several times as long: it multiplies each run of 32 numbers by its scale in a loop of
its own.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team
from specexec_kernels.cpu_ir_emit import I8, I32, I64, Emitter, ScaleType, build_module

BLOCK = 32  # numbers to a scale; the last block of a row may have fewer
SCALE_BYTES = 2
_ROWS = 64  # of one claim
_STORED: dict[torch.dtype, ScaleType] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Arg(IntEnum):
    """Positions in the int64 argument array of a kernel."""

    COUNTER = 0  # next claim; set to 0 before a call
    PACKED = auto()  # address of the rows
    OUT = auto()  # address of the numbers
    ROWS = auto()  # of a head
    PACKED_HEAD = auto()  # bytes from a head to the next
    OUT_HEAD = auto()  # numbers from a head to the next
    STRIPS = auto()  # claims of a head
    CLAIMS = auto()  # in all


@dataclass(frozen=True, slots=True)
class UnpackSpec:
    """What a kernel is compiled for."""

    size: int  # numbers of a row
    stored: ScaleType  # dtype of what comes out
    lanes: int


class Kernel(Emitter):
    """Emits a kernel that unpacks rows."""

    def __init__(self, spec: UnpackSpec, function: ir.Function) -> None:
        super().__init__(ir.IRBuilder(function.append_basic_block("entry")), spec.lanes)
        self.spec = spec
        self.base = self.b.ptrtoint(function.args[0], I64)
        self.arg = {arg: self.load(self.base, I64(arg), I64, 8) for arg in Arg}

    def emit(self) -> None:
        """Emits the kernel: claims rows until none is left."""
        b, arg = self.b, self.arg

        def work(claim: Any, _: Any) -> None:
            head = b.udiv(claim, arg[Arg.STRIPS])
            first = b.mul(b.urem(claim, arg[Arg.STRIPS]), I64(_ROWS))
            last = self.minimum(b.add(first, I64(_ROWS)), arg[Arg.ROWS])
            packed = b.add(arg[Arg.PACKED], b.mul(head, arg[Arg.PACKED_HEAD]))
            out = b.mul(head, arg[Arg.OUT_HEAD])

            def row(at: Any, _: list[Any]) -> list[Any]:
                self.row(packed, at, b.add(out, b.mul(at, I64(self.spec.size))))
                return []

            self.loop(first, last, 1, [], row)

        counter = self.ptr(self.base, I64(0), 8)
        self.claim_strips(counter, I64(0), arg[Arg.CLAIMS], I64(1), work)

    def row(self, packed: Any, at: Any, out: Any) -> None:
        """Emits the unpacking of row `at` of a head, to the numbers from `out` on."""
        blocks = self.spec.size // BLOCK
        n_bytes = self.spec.size + blocks * SCALE_BYTES
        start = self.b.add(packed, self.b.mul(at, I64(n_bytes)))
        codes = ir.VectorType(I8, self.lanes)
        for block in range(blocks):
            scale = self.load_scales("float16", start, I64(block), 1)
            scale = self.splat(self.b.extract_element(scale, I32(0)), self.lanes)
            for begin in range(block * BLOCK, (block + 1) * BLOCK, self.lanes):
                there = I64(blocks * SCALE_BYTES + begin)
                wide = self.b.sext(self.load(start, there, codes, 1), self.words)
                found = self.b.fmul(self.to_float(wide), scale)
                self.store_as(self.spec.stored, found, self.arg[Arg.OUT],
                              self.b.add(out, I64(begin)))  # fmt: skip


def supports(rows: Tensor, out: Tensor) -> bool:
    """Whether there is a kernel for these tensors."""
    size, one_text = out.shape[-1], out.shape[0] == 1
    in_rows = all(each.stride()[2:] == (each.shape[3], 1) for each in (rows, out))
    on_cpu = rows.device.type == out.device.type == "cpu"
    return on_cpu and one_text and in_rows and out.dtype in _STORED and not size % BLOCK


def unpack(rows: Tensor, out: Tensor) -> None:
    """See eight_bit_kv.unpack; `supports` must accept the tensors."""
    _, heads, count, size = out.shape
    strips = -(-count // _ROWS)
    values = {
        Arg.COUNTER: 0,
        Arg.PACKED: rows.data_ptr(),
        Arg.OUT: out.data_ptr(),
        Arg.ROWS: count,
        Arg.PACKED_HEAD: rows.stride(1),
        Arg.OUT_HEAD: out.stride(1),
        Arg.STRIPS: strips,
        Arg.CLAIMS: heads * strips,
    }
    if heads * strips:
        table = array("q", [values[arg] for arg in Arg])
        kernel = _kernel(UnpackSpec(size, _STORED[out.dtype], cpu_jit.lanes()))
        cpu_team.run(kernel, table.buffer_info()[0], heads * strips)


@cache
def _kernel(spec: UnpackSpec) -> Any:
    return cpu_jit.compiled(
        "unpack_kv", spec,
        lambda name: build_module(name, lambda function: Kernel(spec, function).emit()),
    )  # fmt: skip
