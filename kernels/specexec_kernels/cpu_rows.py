"""Rows times row-packed weights on a CPU; see cpu_rows_ir for how, and formats/ for what.

A row's result depends on neither the other rows nor the number of threads. What no kernel reads is
unpacked by its definition and multiplied as float32, with the same property.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_linear
from specexec_kernels.cpu_rows_ir import build_rows
from specexec_kernels.cpu_rows_lanes import (
    AT_ONCE,
    CHUNKS,
    COUNTER,
    OUT,
    OUTPUTS,
    PARTS,
    STRIPS,
    UNITS,
    X_SUMS,
    RowSpec,
    X,
)
from specexec_kernels.formats.base import RowFormat, RowWeight, has_halves

_FEW = (1, 2, 4)  # rows that multiply straight from the registers
# Rows of a chunk; with two vectors of outputs 13 fill 32 registers, and 6 the 16 of AVX2.
_MANY = (1, 2, 4, 8, 10, 13)
_MANY_OF_16 = (1, 2, 4, 6)


def supports(weight: RowWeight) -> bool:
    """Whether the kernels read this weight: whole units, at least one vector of outputs."""
    return (
        weight.format.compiled
        and sys.byteorder == "little"
        and weight.in_features % weight.format.unit == 0
        and weight.out_features >= cpu_jit.lanes()
    )


def matmul(x: Tensor, weight: RowWeight) -> Tensor:
    """x (rows, inputs) @ W.T as float32 (rows, outputs).

    bfloat16 rows are multiplied by pairs where the CPU can, the weights rounded to bfloat16 as the
    format's `pairs` says; all else as float32.
    """
    if not supports(weight):
        return _unpacked_product(x.float(), weight)
    dot = x.dtype == torch.bfloat16 and cpu_jit.has_dot() and cpu_jit.has_matmul(torch.bfloat16)
    spec = _spec(x.shape[0], weight, dot)
    x = x if dot else x.float()
    items, x_sums = _arranged(x, spec)
    strips = -(-weight.out_features // spec.strip)
    out = torch.zeros(items.shape[0] * spec.rows, strips * spec.strip)
    at_once = cpu_jit.strips_at_once(strips) if spec.few else 1
    keep = {leaf: tensor.contiguous() for leaf, tensor in weight.tensors.items()}
    values = {
        COUNTER: 0,
        X: items.data_ptr(),
        X_SUMS: x_sums.data_ptr(),
        CHUNKS: items.shape[0],
        OUT: out.data_ptr(),
        UNITS: weight.in_features // weight.format.unit,
        OUTPUTS: weight.out_features,
        STRIPS: strips,
        AT_ONCE: at_once,
    }
    for number, part in enumerate(weight.format.parts):
        columns = part.shape(weight.out_features, weight.in_features)[1]
        values[PARTS + 2 * number] = keep[part.leaf].data_ptr()
        values[PARTS + 2 * number + 1] = columns
    args = torch.tensor([values[at] for at in range(len(values))], dtype=torch.int64)
    cpu_jit.run(_kernel(spec), args.data_ptr(), -(-strips // at_once))
    return _in_order(out[: x.shape[0]], spec, weight.out_features)


def _unpacked_product(x: Tensor, weight: RowWeight) -> Tensor:
    """As `matmul` by the format's definition; a whole matrix of float32 may be too much for the
    RAM. How outputs are cut changes no sum."""
    out = torch.empty(x.shape[0], weight.out_features)
    for start, slab in weight.slabs():
        out[:, start : start + len(slab)] = cpu_linear.product(x, slab)
    return out


def chunk_rows(rows: int) -> int:
    """Rows of a chunk: as few rows too many as possible, and then large chunks."""
    sizes = _MANY_OF_16 if cpu_jit.lanes() == 8 else _MANY
    if rows <= sizes[-1]:
        return next(size for size in sizes if size >= rows)
    return min(sizes[-3:], key=lambda size: (-(-rows // size) * size, -size))


def _spec(rows: int, weight: RowWeight, dot: bool) -> RowSpec:
    lanes, byte_tables = cpu_jit.lanes(), bool(cpu_jit.features().get("avx512vbmi"))
    if rows <= _FEW[-1]:
        size = next(size for size in _FEW if size >= rows)
        return RowSpec(weight.format, dot, size, 1, lanes, True, byte_tables)
    vectors = 2 if weight.out_features >= 2 * lanes else 1
    return RowSpec(weight.format, dot, chunk_rows(rows), vectors, lanes, False, byte_tables)


def _arranged(x: Tensor, spec: RowSpec) -> tuple[Tensor, Tensor]:
    """Rows as the kernels read them.

    Args:
        x: (rows, inputs) of the dtype that is multiplied.
    Returns:
        (chunks, items, rows of a chunk) 32-bit items, and (chunks, blocks, rows of a chunk) float32
        sums over each block, where the format has offsets. Rows too many are zero.
    """
    (rows, inputs), size, fmt = x.shape, spec.rows, spec.format
    chunks = max(-(-rows // size), 1)
    if chunks * size != rows:
        x = torch.nn.functional.pad(x, (0, 0, 0, chunks * size - rows))
    sums = _block_sums(x, fmt.block) if fmt.has_offset else x.new_zeros(1, dtype=torch.float32)
    if fmt.has_offset:
        sums = sums.view(chunks, size, -1).transpose(1, 2).contiguous()
    order = _order(fmt)
    if order is not None:
        x = x.view(-1, inputs // fmt.unit, fmt.unit)[:, :, order]
    words = x.contiguous().view(torch.int32).view(chunks, size, -1)
    return words.transpose(1, 2).contiguous(), sums


def _block_sums(x: Tensor, block: int) -> Tensor:
    """(rows, inputs) to (rows, blocks) float32, added two by two: one order for any rows."""
    assert has_halves(block), f"a block of {block} inputs has no order of halves"
    x = x.float()
    if x.shape[1] % block:
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % block))
    sums = x.view(x.shape[0], -1, block)
    while sums.shape[2] > 1:
        first, second = sums.chunk(2, dim=2)
        sums = first + second
    return sums[..., 0]


def _in_order(out: Tensor, spec: RowSpec, outputs: int) -> Tensor:
    """The outputs without those that the last strip shares with the one before it."""
    whole = outputs // spec.strip * spec.strip
    if whole == outputs:
        return out
    rest = outputs - whole
    return torch.cat([out[:, :whole], out[:, out.shape[1] - rest :]], dim=1)


@cache
def _order(fmt: RowFormat) -> Tensor | None:
    """The inputs of a unit as its items take them; None where they stay as they are."""
    return None if fmt.order == tuple(range(fmt.unit)) else torch.tensor(fmt.order)


@cache
def _kernel(spec: RowSpec) -> Any:
    name = "specexec_rows"
    return cpu_jit.compile_ir(build_rows(spec, name), name)
