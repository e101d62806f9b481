"""Compile the Triton kernels for GPUs that are not here, and check whether they would fit.

    python scripts/compile_kernels.py                   # every generation, every kernel
    python scripts/compile_kernels.py --gpus rtx-30 --quick

Triton's compiler and NVIDIA's assembler need no GPU. They show whether a kernel compiles, whether
its shared memory is within a block's limit (a launch fails otherwise), whether registers spill, and
how many of its blocks a multiprocessor runs at once. The machine code shows whether it loads 16
bytes at once and multiplies on tensor cores. Results and speed are not tested. Exits with 1 if a
kernel does not compile or fit, lacks what WANTED asks of it, or rounds differently in the two loops
of attention. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported: these kernels are compiled

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from kernel_cases import random_weight, row_weight
from quantize_columns import COLUMN_RECIPES, PACKERS, packed_weight
from specexec_kernels import (
    triton_compact_kv,
    triton_experts,
    triton_gumbel,
    triton_norm,
    triton_pinned,
    triton_recurrence,
    triton_rotary,
    triton_rows,
    triton_topk,
    triton_tree_attention,
)
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.recurrence import Order
from specexec_kernels.split_rows import BLOCK_SLOTS, NO_FRONT, SplitRows
from specexec_kernels.tree_attention import COLUMNS, TreeMask
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

# Compute capability, KiB of shared memory that a block may have (a multiprocessor has one more for
# each block), and warps that a multiprocessor holds: CUDA programming guide, table of technical
# specifications per compute capability.
GPUS = {
    "a100": (80, 163, 64),
    "rtx-30": (86, 99, 48),
    "rtx-40": (89, 99, 48),
    "h100": (90, 227, 64),
    "rtx-50": (120, 99, 48),
}
REGISTERS = 65536  # registers of a multiprocessor, given to warps in pieces of 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU = torch.device("cpu")
# variants of attention, with the head sizes of the models that have them
FORMS: dict[str, dict[str, Any]] = {
    "Gemma-2's cap": {"head_dim": 256, "softcap": 50.0},
    "gpt-oss' sinks": {"head_dim": 64, "sinks": True},
    "DeepSeek-V3's heads": {"head_dim": 192, "value_dim": 128, "kv_heads": 32},
    "shared rows": {"head_dim": 128, "shared": 4},
}
PACKED = (*PACKERS, "Q4_0", "Q8_0", "Q4_K", "Q6_K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One kernel, specialized and compiled for one GPU."""

    gpu: str
    case: str
    shared_bytes: int
    shared_limit_bytes: int
    registers: int
    spilled_bytes: int  # bytes of stack per thread
    warps: int  # warps of a block
    blocks: int  # blocks that a multiprocessor runs at once
    wide_loads: int  # instructions that load 16 bytes from global memory
    tensor_products: int  # instructions of tensor cores
    fused: list[int]  # fused multiply-adds of each loop that has products of tensor cores
    seconds: float
    error: str = ""

    @property
    def missing(self) -> str:
        """What is wrong with the kernel; empty if nothing is."""
        if self.error or self.shared_bytes > self.shared_limit_bytes:
            return f"DOES NOT FIT {self.error}"
        if self.case.startswith("tree attention") and len(set(self.fused)) > 1:
            return "LOOPS ROUND DIFFERENTLY"  # a row has other bits among other rows
        for pattern, wide_loads, tensor_products in WANTED:
            if re.search(pattern, self.case):
                if wide_loads and not self.wide_loads:
                    return "LOADS NOT 16 BYTES AT ONCE"
                if tensor_products and not self.tensor_products:
                    return "USES NO TENSOR CORES"
        return ""


# (cases, whether they must load 16 bytes at once, whether they must use tensor cores)
WANTED = (
    (r"tree attention.*(float16|bfloat16)", True, True),
    (r"(product|experts), (float16|bfloat16)", True, True),
    (r"bit dequantize", True, False),
    (r"top-\d+, float32", True, False),
)


class AbsentGpu:
    """Stands for Triton's driver, with what Triton asks of it when it only compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # kernels are kept per device

    def get_current_stream(self, device: int) -> int:
        return 0


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of the kernels, over the shapes that decide which resources they need."""
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for head_dim in (128, 256, 512) if quick else (64, 80, 128, 256, 512):
            yield f"tree attention, heads of {head_dim}, {name}", attention(64, head_dim, dtype)
        if quick and dtype != torch.float16:
            continue
        for form, options in FORMS.items():
            yield f"tree attention, {form}, {name}", attention(64, dtype=dtype, **options)
        for bits in (4,) if quick else (2, 3, 4, 8):
            weight = random_weight(4096, 1024, bits, CPU)  # whose inputs are cut
            for rows in (1, 32, 64, 128):
                yield f"{bits}-bit product, {name}, {rows} rows", product(rows, weight, dtype)
            for rows in (16, 1024):  # whose cuts several programs share, and one has all of
                yield f"{bits}-bit experts, {name}, {rows} rows", experts(rows, weight, dtype)
            if dtype != torch.float32:
                into_float32 = product(16, weight, dtype, torch.float32)
                yield f"{bits}-bit product, {name} into float32", into_float32
            yield (
                f"{bits}-bit dequantize, {name}",
                lambda d=dtype, w=weight: triton_rows.unpack(w, d),
            )
        for each, packed in weights(quick):
            for rows in (16, 128):
                yield f"{each} product, {name}, {rows} rows", product(rows, packed, dtype)
            for rows in (16, 128, 256):  # in tiles of 16, 32 and 64
                yield f"{each} experts, {name}, {rows} rows", experts(rows, packed, dtype)
            yield f"{each} unpacked, {name}", lambda d=dtype, w=packed: triton_rows.unpack(w, d)
        logits = torch.zeros(16, 32000, dtype=dtype)
        for k in (32, 256):  # picked one by one, and sorted
            yield (
                f"log-softmax + top-{k}, {name}",
                lambda x=logits, k=k: triton_topk.log_softmax_topk(x, k),
            )
        chosen = torch.arange(8 * 64).view(64, 8) % 128
        routes = torch.zeros(2 * 512 + 3 * 512, dtype=torch.int32)
        yield (
            f"experts' places sorted, {name}",
            lambda c=chosen, d=dtype: triton_experts.routes(c, 128, d),
        )
        outputs = torch.zeros(512, 2048, dtype=dtype)
        yield (
            f"experts' outputs summed, {name}",
            lambda o=outputs, c=chosen, r=routes: triton_experts.row_sums(
                o, c, torch.zeros(64, 8, dtype=o.dtype), r
            ),
        )
        for width in (128, 5120):  # of a head, and of a row
            yield f"norm of {width}, {name}", norm(width, dtype)
        q, k = (torch.zeros(1, 16, heads, 128, dtype=dtype).transpose(1, 2) for heads in (32, 8))
        for width in (128, 32):
            yield f"positions of {width}, {name}", positions(q, k, width)
        cache = torch.zeros(8, 300, 128, dtype=dtype)
        yield (
            f"cache compaction, {name}",
            lambda x=cache: triton_compact_kv.compact_kv(x, x, torch.arange(7, 20), 3),
        )
    eight_bit = torch.zeros(8, 300, 136, dtype=torch.uint8)
    yield (
        "cache compaction, 8 bits",
        lambda: triton_compact_kv.compact_kv(eight_bit, eight_bit, torch.arange(7, 20), 3),
    )

    # a layer of Qwen3.5-27B, and one of Mamba-1's with channels of 16 states
    for form, state, decay_dims in (
        ("delta rule", (48, 128, 128), 0), ("scan of channels", (1, 16, 4096), 2),
    ):  # fmt: skip
        for rows in ("a chain", "a tree"):
            yield f"{form}, {rows}", recurrence(state, decay_dims, rows == "a tree")
    block = torch.zeros(40_000, dtype=torch.uint8)
    yield "pinned memory", lambda: triton_pinned.read_pinned(block, block)
    yield "noise", lambda: triton_gumbel.gumbel_noise(torch.empty(32000), 1, 2)


def weights(quick: bool) -> Iterator[tuple[str, PackedWeight]]:
    """A weight of every format, by name; of some also as it lies where it stays on a GPU."""
    for name in ("nvfp4", "Q4_K", "awq", "Q6_K") if quick else PACKED:
        plain = torch.randn(1024, 2048 if name == "Q6_K" else 1024)
        down = name in COLUMN_RECIPES
        packed = packed_weight(name, plain) if down else row_weight(name, plain)
        staying = packed.format.staying(packed.in_features)
        if not quick or name != "Q6_K":
            yield name, packed
        if staying is not None and name != "awq":  # which is then GPTQ
            tensors = packed.format.rearrange(packed.matrices())
            yield f"{name} that stays", replace(packed, format=staying, tensors=tensors)


def product(
    rows: int, weight: PackedWeight, dtype: torch.dtype, out_dtype: torch.dtype | None = None
) -> Callable[[], object]:
    x = torch.zeros(rows, weight.in_features, dtype=dtype)
    return lambda: triton_rows.quantized_matmul(x, weight, out_dtype)


def experts(rows: int, weight: PackedWeight, dtype: torch.dtype) -> Callable[[], object]:
    """Gate and up of eight experts, for rows that are routed to two."""
    table = triton_experts.table_of([[weight, weight]] * 8, [[None, None]] * 8)
    assert table is not None, weight.format.name
    x, places = torch.zeros(rows, weight.in_features, dtype=dtype), 2 * rows
    tile = triton_experts.tile_rows(places, 8, dtype)
    routes = torch.zeros(2 * places + 3 * triton_experts.most_tiles(places, 8, tile)).int()
    return lambda: triton_experts.products(x, table, routes, 2, places)


def norm(width: int, dtype: torch.dtype) -> Callable[[], object]:
    x, weight = torch.zeros(16, width), torch.zeros(width)
    return lambda: triton_norm.rms_norm(
        x, weight, 1e-6, centred=False, rounded=True, out_dtype=dtype
    )


def positions(q: torch.Tensor, k: torch.Tensor, width: int) -> Callable[[], object]:
    angles = torch.zeros(1, 16, width, dtype=q.dtype)
    return lambda: triton_rotary.rotary(q, k, angles, angles)


def attention(
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    kv_heads: int = 8,
    value_dim: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    shared: int = 0,
) -> Callable[[], object]:
    """Attention of some rows to 300 slots and, in front of them, blocks that texts share."""
    queries = torch.zeros(rows, 32, head_dim, dtype=dtype)
    keys = torch.zeros(kv_heads, 300, head_dim, dtype=dtype)
    values = torch.zeros(kv_heads, 300, value_dim or head_dim, dtype=dtype)
    if shared:
        longest = shared * BLOCK_SLOTS
        keys, values = (
            SplitRows(NO_FRONT.longer(rows[None, :, :longest]), rows[None])
            for rows in (keys, values)
        )
    mask = TreeMask(torch.zeros(rows, COLUMNS + 16, dtype=torch.int32), 236)
    return lambda: triton_tree_attention.tree_attention(
        queries, keys, values, mask, None, softcap, torch.zeros(32) if sinks else None
    )  # fmt: skip


def recurrence(
    state: tuple[int, int, int], decay_dims: int, branches: bool
) -> Callable[[], object]:
    heads, key_dim, value_dim = state
    keys = torch.zeros(8, max(1, heads // 3), key_dim)
    order = Order.depth_first([-1, -1, 0, 0, 1, 1, 2, 2], range(8)) if branches else Order.chain(8)
    return lambda: triton_recurrence.recurrence(
        torch.zeros(state), keys, keys, torch.zeros(8, heads, value_dim),
        torch.zeros((8, *state)[: 2 + decay_dims]), torch.zeros(8, heads), order,
        corrects=not decay_dims,
    )  # fmt: skip


def compile_all(gpu: str, quick: bool) -> Iterator[Compiled]:
    """Compiles every case for one GPU. Launches only compile, so outputs are undefined."""
    capability, shared_kib, most_warps = GPUS[gpu]
    triton.runtime.driver.set_active(AbsentGpu(capability))
    launched: list[Any] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
        launched.append(run(kernel, *args, warmup=True, **options))  # returned to nobody to launch

    JITFunction.run = compile_only
    try:
        for name, call in cases(quick):
            launched.clear()
            start, error = time.perf_counter(), ""
            try:
                call()
            except triton.TritonError as failure:
                error = str(failure)
            compiled = launched[0] if launched else None
            registers, spilled = usage(compiled.asm["cubin"]) if compiled else (0, 0)
            wide, products = instructions(compiled.asm["cubin"]) if compiled else (0, 0)
            fused = fused_by_loop(compiled.asm["cubin"]) if compiled else []
            shared = compiled.metadata.shared if compiled else 0
            warps = compiled.metadata.num_warps if compiled else 0
            yield Compiled(
                gpu=gpu, case=name, shared_bytes=shared, shared_limit_bytes=shared_kib * 1024,
                registers=registers, spilled_bytes=spilled, warps=warps,
                blocks=blocks_at_once(registers, shared, warps, shared_kib, most_warps),
                wide_loads=wide, tensor_products=products, fused=fused,
                seconds=time.perf_counter() - start, error=error,
            )  # fmt: skip
    finally:
        JITFunction.run = run


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, from cuobjdump."""
    found = dict(re.findall(r"(REG|STACK):(\d+)", _dumped(cubin, "-res-usage")))
    return int(found["REG"]), int(found["STACK"])


def fused_by_loop(cubin: bytes) -> list[int]:
    """Counts the fused multiply-adds of each innermost loop that multiplies on tensor cores."""
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", _dumped(cubin, "-sass"))
    places = {int(address, 16): place for place, (address, _) in enumerate(lines)}
    loops = []
    for place, (_, text) in enumerate(lines):
        target = re.search(r"\bBRA\S*\s+.*?0x([0-9a-f]+)", text)
        first = places.get(int(target[1], 16), place) if target else place
        if first < place:
            loop = [each for _, each in lines[first : place + 1]]
            if any(re.search(r"\bHG?MMA\.", each) for each in loop):
                loops.append((first, place, sum("FFMA" in each for each in loop)))
    # rare parts of a loop may stand behind another loop, and branch back across it
    return [
        fused for first, last, fused in loops
        if not any(first < other and last > end for other, end, _ in loops)
    ]  # fmt: skip


def instructions(cubin: bytes) -> tuple[int, int]:
    """Counts instructions that load 16 bytes from global memory, and products of tensor cores.

    Source: NVIDIA, CUDA binary utilities, instruction set reference (LDG, LDGSTS, HMMA, QGMMA).
    """
    text = _dumped(cubin, "-sass")
    wide = re.findall(r"\b(?:LDG|LDGSTS)\.[A-Z0-9.]*\b128\b", text)
    return len(wide), len(re.findall(r"\b(?:HMMA|HGMMA|QGMMA|OMMA|QMMA)\.", text))


@cache
def _dumped(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, what, file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip


def blocks_at_once(
    registers: int, shared_bytes: int, warps: int, shared_kib: int, most_warps: int
) -> int:
    """Blocks of a kernel that one multiprocessor runs at once.

    Args:
        registers: registers of a thread.
        shared_bytes, warps: of a block.
        shared_kib: most shared memory of a block, KiB.
        most_warps: most warps of a multiprocessor.
    """
    if not warps:
        return 0
    of_a_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // of_a_warp // warps if registers else most_warps
    by_shared = (shared_kib + 1) * 1024 // (shared_bytes + 1024)  # the system takes 1 KiB of each
    return min(by_registers, by_shared, most_warps // warps)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", default=",".join(GPUS), metavar="NAME,...")
    parser.add_argument("--quick", action="store_true", help="the cases that need most")
    args = parser.parse_args(argv)
    found = []
    print(f"{'':<58}{'shared KiB':>12}{'registers':>11}{'spilled':>9}{'blocks':>8}{'of warps':>9}"
          f"{'LDG.128':>9}{'HMMA':>6}{'s':>6}")  # fmt: skip
    for gpu in args.gpus.split(","):
        for kernel in compile_all(gpu, args.quick):
            found.append(kernel)
            name = f"{gpu}: {kernel.case}"
            shared = f"{kernel.shared_bytes // 1024} of {kernel.shared_limit_bytes // 1024}"
            print(f"{name:<58}{shared:>12}{kernel.registers:11}{kernel.spilled_bytes:9}"
                  f"{kernel.blocks:8}{kernel.warps:9}{kernel.wide_loads:9}"
                  f"{kernel.tensor_products:6}{kernel.seconds:6.1f}  {kernel.missing}",
                  flush=True)  # fmt: skip
    print(json.dumps({"triton": triton.__version__, "kernels": [asdict(k) for k in found]}))
    return 1 if any(kernel.missing for kernel in found) else 0


if __name__ == "__main__":
    sys.exit(main())
