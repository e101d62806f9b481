"""Rows times row-packed weights on a CPU; see cpu_rows_ir for how, and formats/ for what.

A row's result depends on neither the other rows nor the number of threads. What no kernel reads is
unpacked by its definition and multiplied as float32, with the same property.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_linear, cpu_team
from specexec_kernels.cpu_arrange_ir import ArrangeSpec, build_arrange
from specexec_kernels.cpu_rows_ir import build_rows
from specexec_kernels.cpu_rows_lanes import RowSpec
from specexec_kernels.formats.base import RowFormat, RowWeight, has_halves

_FEW = (1, 2, 4)  # rows that multiply straight from the registers
# Rows of a chunk; with two vectors of outputs 13 fill 32 registers, and 6 the 16 of AVX2.
_MANY = (1, 2, 4, 8, 10, 13)
_MANY_OF_16 = (1, 2, 4, 6)


@dataclass(frozen=True, slots=True)
class _Call:
    """What all products of weights of one format and size with as many rows share."""

    spec: RowSpec
    kernel: Any
    arrange: Any
    order: Tensor  # int32, as ArrangeSpec.unit
    columns: tuple[int, ...]  # of each part's tensor
    strips: int
    blocks: int  # of inputs, 0 where none has an offset


def supports(weight: RowWeight) -> bool:
    """Whether the kernels read this weight: whole units, at least one vector of outputs."""
    return _reads(weight.format, weight.in_features, weight.out_features)


@cache
def _reads(fmt: RowFormat, inputs: int, outputs: int) -> bool:
    return (
        fmt.compiled
        and sys.byteorder == "little"
        and inputs % fmt.unit == 0
        and outputs >= cpu_jit.lanes()
    )


def matmul(x: Tensor, weight: RowWeight) -> Tensor:
    """x (rows, inputs) @ W.T as float32 (rows, outputs).

    bfloat16 rows are multiplied by pairs where the CPU can, the weights rounded to bfloat16 as the
    format's `pairs` says; all else as float32.
    """
    if not supports(weight) or not len(x):
        return _unpacked_product(x.float(), weight)
    dot = x.dtype == torch.bfloat16 and cpu_jit.has_dot() and cpu_jit.has_matmul(torch.bfloat16)
    rows, outputs = x.shape[0], weight.out_features
    size = chunk_rows(rows)
    call = _call(weight.format, weight.in_features, outputs, dot, size, rows <= _FEW[-1])
    spec, strips = call.spec, call.strips
    x = x.contiguous() if dot else x.float().contiguous()
    chunks = -(-rows // size)
    items = torch.empty(chunks * size * weight.in_features // spec.per_item, dtype=torch.int32)
    sums = torch.empty(chunks * size * call.blocks)
    # both in the order of the positions that cpu_arrange_ir and cpu_rows_lanes name
    arguments = array("q", (0, x.data_ptr(), rows, weight.in_features, call.order.data_ptr()))
    arguments.extend((items.data_ptr(), sums.data_ptr(), chunks))
    cpu_team.run(call.arrange, arguments.buffer_info()[0], chunks)
    # few rows are stored, sums of others are added to
    shape = chunks * size, strips * spec.strip
    out = torch.empty(shape) if spec.few else torch.zeros(shape)
    at_once = cpu_team.strips_at_once(strips) if spec.few else 1
    units = weight.in_features // weight.format.unit
    arguments = array("q", (0, items.data_ptr(), sums.data_ptr(), chunks, out.data_ptr()))
    arguments.extend((units, outputs, strips, at_once))
    keep = [weight.tensors[part.leaf].contiguous() for part in weight.format.parts]
    for tensor, columns in zip(keep, call.columns, strict=True):
        arguments.extend((tensor.data_ptr(), columns))
    cpu_team.run(call.kernel, arguments.buffer_info()[0], -(-strips // at_once))
    return _in_order(out[:rows], spec, outputs)


@cache
def _call(fmt: RowFormat, inputs: int, outputs: int, dot: bool, size: int, few: bool) -> _Call:
    """For chunks of `size` rows."""
    lanes, byte_tables = cpu_jit.lanes(), bool(cpu_jit.features().get("avx512vbmi"))
    vectors = 1 if few or outputs < 2 * lanes else 2
    spec = RowSpec(fmt, dot, size, vectors, lanes, few, byte_tables)
    block = fmt.block if fmt.has_offset else 0
    assert has_halves(block), f"a block of {block} inputs has no order of halves"
    return _Call(
        spec,
        _kernel(spec),
        _arrange(ArrangeSpec(dot, size, fmt.unit, block, lanes)),
        torch.tensor(fmt.order, dtype=torch.int32),
        tuple(part.shape(outputs, inputs)[1] for part in fmt.parts),
        -(-outputs // spec.strip),
        -(-inputs // block) if block else 0,
    )


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


def _in_order(out: Tensor, spec: RowSpec, outputs: int) -> Tensor:
    """The outputs without those that the last strip shares with the one before it."""
    whole = outputs // spec.strip * spec.strip
    if whole == outputs:
        return out
    rest = outputs - whole
    return torch.cat([out[:, :whole], out[:, out.shape[1] - rest :]], dim=1)


@cache
def _kernel(spec: RowSpec) -> Any:
    # formats of two files may have one name
    told = type(spec.format).__module__, spec
    return cpu_jit.compiled("rows", told, partial(build_rows, spec))


@cache
def _arrange(spec: ArrangeSpec) -> Any:
    return cpu_jit.compiled("arrange", spec, partial(build_arrange, spec))
