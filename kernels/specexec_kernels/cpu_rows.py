"""Rows times packed weights on a CPU; see cpu_rows_ir for how, and formats/ for what.

A row's result depends on neither the other rows nor the number of threads. What no kernel reads is
unpacked by its definition and multiplied as float32, with the same property.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Hashable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_dot, cpu_jit, cpu_linear, cpu_team
from specexec_kernels.cpu_arrange_ir import ArrangeSpec, build_arrange
from specexec_kernels.cpu_products import product
from specexec_kernels.cpu_rows_ir import build_rows
from specexec_kernels.cpu_rows_spec import (
    AT_ONCE,
    CHUNKS,
    OUT,
    OUTPUTS,
    PARTS,
    SCRATCH,
    STRIPS,
    UNITS,
    X_SUMS,
    PackedSpec,
    X,
)
from specexec_kernels.cpu_tiles_ir import TILE_PAIRS
from specexec_kernels.formats.base import PackedFormat, PackedWeight, has_halves

_NARROW_ROWS = 64  # in tiles: a pass of so many waits for memory, and narrow strips are read faster
_FEW = (1, 2, 4)  # rows that multiply straight from the registers
# Rows of a chunk; with two vectors of outputs 13 fill 32 registers, and 6 the 16 of AVX2.
_MANY = (1, 2, 4, 8, 10, 13)
_MANY_OF_16 = (1, 2, 4, 6)


def supports(weight: PackedWeight) -> bool:
    """Whether the kernels read this weight: whole units, at least one vector of outputs."""
    return _reads(weight.format, weight.in_features, weight.out_features)


@cache
def _reads(fmt: PackedFormat, inputs: int, outputs: int) -> bool:
    return (
        fmt.compiled
        and sys.byteorder == "little"
        and inputs % fmt.unit == 0
        and outputs >= cpu_jit.lanes()
    )


def matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    """x (rows, inputs) @ W.T as float32 (rows, outputs).

    bfloat16 rows are multiplied by pairs where the CPU can, the weights rounded to bfloat16 as the
    format's `pairs` says; all else as float32.
    """
    if not supports(weight) or not len(x):
        return _unpacked_product(x.float(), weight)
    return product(form_for(x.dtype), x, weight)


def form_for(rows: torch.dtype) -> Rows:
    """How rows of a dtype are multiplied with weights that `supports` accepts."""
    dot = rows == torch.bfloat16 and cpu_jit.has_dot() and cpu_jit.has_matmul(torch.bfloat16)
    return _PAIRS if dot else _SINGLE


class Rows:
    """Packed weights; see cpu_products.Form."""

    places = (OUT, CHUNKS)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def kind(self, weight: PackedWeight) -> Hashable:
        return weight.format, weight.in_features, weight.out_features

    def spec(self, rows: int, weight: PackedWeight) -> PackedSpec:
        lanes, byte_tables = cpu_jit.lanes(), bool(cpu_jit.features().get("avx512vbmi"))
        dot, tiles = self.dtype == torch.bfloat16, self._uses_tiles(weight)
        few = rows <= _FEW[-1] and not tiles
        size = cpu_dot.tile_rows(rows) if tiles else chunk_rows(rows)
        if weight.format.goes_down:
            most = _most_vectors(size) if few else 2
        else:
            most = 1 if few or (tiles and rows <= _NARROW_ROWS) else 2
        vectors = next(n for n in (4, 2, 1) if n <= most and n * lanes <= weight.out_features)
        return PackedSpec(weight.format, dot, size, vectors, lanes, few, tiles, byte_tables)

    def _uses_tiles(self, weight: PackedWeight) -> bool:
        """Whether rows are multiplied in tiles, however many they are; see cpu_tiles_ir."""
        if self.dtype != torch.bfloat16 or not cpu_jit.has_tiles():
            return False
        tile = 2 * TILE_PAIRS  # inputs; blocks are whole tiles, or parts that divide one
        fits = weight.format.block % tile == 0 or tile % weight.format.block == 0
        return fits and weight.in_features % tile == 0

    def kernel(self, spec: PackedSpec, weight: PackedWeight) -> Any:
        return _kernel(spec)

    def arrange(self, x: Tensor, spec: PackedSpec) -> dict[int, Tensor]:
        x = x.contiguous()
        kernel, block = _arrange(spec)
        (rows, inputs), blocks = x.shape, -(-x.shape[1] // block) if block else 0
        chunks = rows // spec.rows
        items = torch.empty(chunks, spec.rows * inputs // spec.per_item, dtype=torch.int32)
        sums = torch.empty(chunks, spec.rows * blocks)
        # in the order of the positions that cpu_arrange_ir names
        table = array("q", (0, x.data_ptr(), rows, inputs))
        table.extend((items.data_ptr(), sums.data_ptr(), chunks))
        cpu_team.run(kernel, table.buffer_info()[0], chunks)
        return {X: items, X_SUMS: sums}

    def sums(self, chunks: int, spec: PackedSpec, weight: PackedWeight) -> Tensor:
        # sums of few rows and in tiles are stored, others are added to
        make = torch.empty if spec.few or spec.tiles else torch.zeros
        return make(chunks, spec.rows, self._strips(spec, weight) * spec.strip)

    def arguments(self, spec: PackedSpec, weight: PackedWeight) -> list[int]:
        values = [0] * (PARTS + 2 * len(weight.format.parts))
        values[UNITS] = weight.in_features // weight.format.unit
        values[OUTPUTS] = weight.out_features
        values[STRIPS] = self._strips(spec, weight)
        values[AT_ONCE] = self._at_once(spec, weight)
        for number, part in enumerate(weight.format.parts):
            columns = part.shape(weight.out_features, weight.in_features)[1]
            values[PARTS + 2 * number + 1] = columns
        return values

    def stored(self, weight: PackedWeight) -> dict[int, Tensor]:
        return {
            PARTS + 2 * number: weight.tensors[part.leaf].contiguous()
            for number, part in enumerate(weight.format.parts)
        }

    def own(self, spec: PackedSpec, weight: PackedWeight) -> dict[int, Tensor]:
        if not weight.format.index:
            return {}
        groups = -(-weight.in_features // weight.format.index[1])
        return {SCRATCH: torch.empty(self._strips(spec, weight) * groups * 2 * spec.strip)}

    def tiles(self, spec: PackedSpec, weight: PackedWeight) -> int:
        return -(-self._strips(spec, weight) // self._at_once(spec, weight))

    def flat(self, sums: Tensor, spec: PackedSpec, weight: PackedWeight) -> Tensor:
        """Without the outputs that the last strip shares with the one before it."""
        flat, outputs = sums.view(-1, sums.shape[2]), weight.out_features
        whole = outputs // spec.strip * spec.strip
        if whole == outputs:
            return flat
        rest = outputs - whole
        return torch.cat([flat[:, :whole], flat[:, flat.shape[1] - rest :]], dim=1)

    @staticmethod
    def _strips(spec: PackedSpec, weight: PackedWeight) -> int:
        return -(-weight.out_features // spec.strip)

    def _at_once(self, spec: PackedSpec, weight: PackedWeight) -> int:
        strips = self._strips(spec, weight)
        if spec.goes_down:
            return cpu_team.strips_at_once(strips, spec.claim_outputs // spec.strip)
        return cpu_team.strips_at_once(strips) if spec.few or spec.tiles else 1


_PAIRS, _SINGLE = Rows(torch.bfloat16), Rows(torch.float32)


def _unpacked_product(x: Tensor, weight: PackedWeight) -> Tensor:
    """As `matmul` by the format's definition; a whole matrix of float32 may be too much for the
    RAM. How outputs are cut changes no sum."""
    out = torch.empty(x.shape[0], weight.out_features)
    for start, slab in weight.slabs():
        out[:, start : start + len(slab)] = cpu_linear.product(x, slab)
    return out


def _most_vectors(rows: int) -> int:
    """Vectors of outputs whose sums, weights and one row's input fill the registers."""
    registers = 16 if cpu_jit.lanes() == 8 else 32  # AVX2 has 16, AVX-512 and NEON 32
    return max((registers - 2) // (rows + 1), 1)


def chunk_rows(rows: int) -> int:
    """Rows of a chunk: as few rows too many as possible, and then large chunks."""
    sizes = _MANY_OF_16 if cpu_jit.lanes() == 8 else _MANY
    if rows <= sizes[-1]:
        return next(size for size in sizes if size >= rows)
    return min(sizes[-3:], key=lambda size: (-(-rows // size) * size, -size))


@cache
def _kernel(spec: PackedSpec) -> Any:
    # formats of two files may have one name
    told = type(spec.format).__module__, spec
    return cpu_jit.compiled("rows", told, partial(build_rows, spec))


@cache
def _arrange(spec: PackedSpec) -> tuple[Any, int]:
    """The kernel that puts rows in order, and the inputs of a sum."""
    fmt = spec.format
    block = fmt.block if spec.has_offset else 0
    assert has_halves(block), f"a block of {block} inputs has no order of halves"
    arranged = ArrangeSpec(spec.dot, spec.rows, block, spec.lanes, fmt.order, spec.tiles)
    kernel = cpu_jit.compiled("arrange", arranged, partial(build_arrange, arranged))
    return kernel, block
