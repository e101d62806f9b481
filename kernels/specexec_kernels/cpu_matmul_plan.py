"""Which kernel multiplies so many rows with a weight, and how rows and results lie in memory.

Weights that differ by nothing but their values share a plan, which is made once: in a pass of one
row all that Python does around a product takes as long as the product.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Hashable
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team
from specexec_kernels.cpu_arrange_ir import ArrangeSpec, build_arrange
from specexec_kernels.cpu_matmul_ir import build_matmul
from specexec_kernels.cpu_matmul_spec import (
    AT_ONCE,
    OUTPUTS,
    PARTS,
    SCRATCH,
    STRIPS,
    UNITS,
    X_SUMS,
    MatmulSpec,
    X,
)
from specexec_kernels.cpu_tiles_ir import TILE_PAIRS
from specexec_kernels.formats.base import PackedFormat, PackedWeight, has_halves

# Rows of a chunk; with two vectors of outputs 13 fill 32 registers, and 6 the 16 of AVX2.
_CHUNKS, _CHUNKS_OF_16 = (1, 2, 4, 8, 10, 13), (1, 2, 4, 6)
_FEW = 4  # rows that multiply straight from the registers, whatever the format
_MOST_WRITTEN_OUT = 416  # products of a unit, which a kernel of few rows has one after another
# In tile registers: rows of a chunk; from so many rows on chunks have 32
_TILE_ROWS, _FEWEST_OF_32 = (1, 2, 4, 8, 16), 97
# Rows of a pass in tile registers that waits for memory: narrow strips are read faster. Behind it
# those of formats that take longer to arrive than to unpack.
_NARROW_ROWS, _NARROW_ROWS_OF_WIDE = 64, 128
# The most outputs of a claim where codes go down the inputs: long parts of a line are read faster.
# With an index the terms of all groups lie in the caches too.
_WIDE_OUTPUTS, _WIDE_OUTPUTS_OF_INDEX = 8192, 4096
# Plans that are kept; all are forgotten once there are so many. Prompts of a server have every
# number of rows, and products of activations (cpu_chains) other sizes with every token of a text.
_MOST_PLANS = 4096


def plan_for(rows: torch.dtype, count: int, weight: PackedWeight) -> Plan | None:
    """How so many rows of a dtype are multiplied; None where no kernel reads the weight.

    Args:
        count: of rows, at least 1.
    """
    dot, kind = multiplies_pairs(rows), (weight.format, weight.in_features, weight.out_features)
    key = rows, dot, count, kind, torch.get_num_threads()
    if key not in _plans:
        if len(_plans) == _MOST_PLANS:
            _plans.clear()
        _plans[key] = _made(rows, dot, count, weight)
    return _plans[key]


def multiplies_pairs(rows: torch.dtype) -> bool:
    """Whether this CPU's kernels multiply rows of a dtype as pairs of bfloat16, or in tiles."""
    return rows == torch.bfloat16 and cpu_jit.has_dot() and cpu_jit.has_matmul(torch.bfloat16)


def reads(weight: PackedWeight) -> bool:
    """Whether the kernels read a weight: whole units, at least one vector of outputs."""
    fits = weight.in_features % weight.format.unit == 0
    wide = weight.out_features >= cpu_jit.lanes()
    return weight.format.compiled and fits and wide and sys.byteorder == "little"


class Plan:
    """How rows of one kind are multiplied with weights of one kind.

    Attributes:
        dtype: of the rows, to which they are converted first.
        rows: of a chunk.
        kernel: compiled.
        claims: how often threads can claim something.
        arguments: the kernel's, where addresses and the number of chunks are still 0.
    """

    def __init__(self, spec: MatmulSpec, inputs: int, outputs: int) -> None:
        """For weights (outputs, inputs) that `reads` accepts."""
        self.dtype = torch.bfloat16 if spec.dot else torch.float32
        self.rows, self.outputs, self._spec = spec.rows, outputs, spec
        self._strips = -(-outputs // spec.strip)
        at_once = _strips_at_once(spec, self._strips)
        self.claims = -(-self._strips // at_once)
        self.kernel = _kernel(spec)
        self.arguments = [0] * (PARTS + 2 * len(spec.format.parts))
        self.arguments[UNITS] = inputs // spec.format.unit
        self.arguments[OUTPUTS] = outputs
        self.arguments[STRIPS] = self._strips
        self.arguments[AT_ONCE] = at_once
        for number, part in enumerate(spec.format.parts):
            self.arguments[PARTS + 2 * number + 1] = part.shape(outputs, inputs)[1]
        self._sum_inputs = spec.format.block if spec.has_offset else 0
        self._sums = -(-inputs // self._sum_inputs) if self._sum_inputs else 0  # of a row
        self._items = inputs // spec.per_item
        self._scratch = 0  # numbers
        if spec.format.index:
            groups = -(-inputs // spec.format.index[1])
            self._scratch = self._strips * groups * 2 * spec.strip

    def arrange(self, x: Tensor, chunks: int) -> dict[int, Tensor]:
        """Rows as the kernel reads them, by argument, (chunks, ...) each.

        Args:
            x: (rows, inputs) of `dtype`; of rows too many in the last chunk nothing is needed.
        """
        x = x.contiguous()
        items = torch.empty(chunks, self.rows * self._items, dtype=torch.int32)
        sums = torch.empty(chunks, self.rows * self._sums)
        # in the order of the positions that cpu_arrange_ir names
        table = array("q", (0, x.data_ptr(), *x.shape))
        table.extend((items.data_ptr(), sums.data_ptr(), chunks))
        kernel = _arrange_kernel(self._spec, self._sum_inputs)
        cpu_team.run(kernel, table.buffer_info()[0], chunks)
        return {X: items, X_SUMS: sums}

    def sums(self, chunks: int) -> Tensor:
        """Memory for the results of so many chunks, (chunks, rows, outputs of all strips)."""
        # a tile's sums are added to those of the tiles before, others are stored once
        make = torch.zeros if self._spec.mode == "many" else torch.empty
        return make(chunks, self.rows, self._strips * self._spec.strip)

    def scratch(self) -> dict[int, Tensor]:
        """Memory that one call needs beside all others, by argument."""
        return {SCRATCH: torch.empty(self._scratch)} if self._scratch else {}

    def flat(self, sums: Tensor) -> Tensor:
        """(rows of all chunks, outputs), without those that the last strip shares with the one
        before it."""
        flat = sums.view(-1, sums.shape[2])
        rest = self.outputs % self._spec.strip
        if not rest:
            return flat
        return torch.cat([flat[:, : self.outputs - rest], flat[:, flat.shape[1] - rest :]], dim=1)


_plans: dict[Hashable, Plan | None] = {}


def _made(rows: torch.dtype, dot: bool, count: int, weight: PackedWeight) -> Plan | None:
    if not reads(weight):
        return None
    inputs, outputs = weight.in_features, weight.out_features
    spec = _spec(weight.format.for_rows(rows, pairs=dot), dot, count, inputs, outputs)
    return _plan(spec, inputs, outputs, torch.get_num_threads())


@lru_cache(_MOST_PLANS)
def _plan(spec: MatmulSpec, inputs: int, outputs: int, threads: int) -> Plan:
    return Plan(spec, inputs, outputs)


def _spec(fmt: PackedFormat, dot: bool, count: int, inputs: int, outputs: int) -> MatmulSpec:
    lanes, byte_tables = cpu_jit.lanes(), bool(cpu_jit.features().get("avx512vbmi"))
    if dot and _fits_tiles(fmt, inputs):
        narrow = _NARROW_ROWS_OF_WIDE if fmt.fetches_early else _NARROW_ROWS
        most = 1 if count <= narrow and not fmt.goes_down else 2
        vectors = _vectors(most, outputs)
        return MatmulSpec(fmt, dot, _tile_rows(count), vectors, lanes, "tiles", byte_tables)
    size = chunk_rows(count)
    unit_items = fmt.unit // (2 if dot else 1)
    few = count <= _FEW or (
        lanes == 16
        and count <= size
        and not fmt.goes_down
        and size * unit_items <= _MOST_WRITTEN_OUT
    )
    most = 2
    if few:
        most = _most_vectors(size) if fmt.goes_down else 1
    vectors = _vectors(most, outputs)
    return MatmulSpec(fmt, dot, size, vectors, lanes, "few" if few else "many", byte_tables)


def _fits_tiles(fmt: PackedFormat, inputs: int) -> bool:
    """Whether a format is multiplied in tile registers, however many the rows; see cpu_tiles_ir."""
    tile = 2 * TILE_PAIRS  # inputs; blocks are whole tiles, or parts that divide one
    fits = fmt.block % tile == 0 or tile % fmt.block == 0
    return fits and inputs % tile == 0 and cpu_jit.has_tiles()


def _tile_rows(count: int) -> int:
    """Rows of a chunk in tile registers."""
    if count >= _FEWEST_OF_32:
        return 32
    return next((size for size in _TILE_ROWS if size >= count), _TILE_ROWS[-1])


def chunk_rows(count: int) -> int:
    """Rows of a chunk: as few rows too many as possible, and then large chunks."""
    sizes = _CHUNKS_OF_16 if cpu_jit.lanes() == 8 else _CHUNKS
    if count <= sizes[-1]:
        return next(size for size in sizes if size >= count)
    return min(sizes[-3:], key=lambda size: (-(-count // size) * size, -size))


def _most_vectors(rows: int) -> int:
    """Vectors of outputs whose sums, weights and one row's input fill the registers."""
    registers = 16 if cpu_jit.lanes() == 8 else 32  # AVX2 has 16, AVX-512 and NEON 32
    return (registers - 2) // (rows + 1)


def _vectors(most: int, outputs: int) -> int:
    """Vectors of outputs in a strip."""
    return next((n for n in (4, 2) if n <= most and n * cpu_jit.lanes() <= outputs), 1)


def _strips_at_once(spec: MatmulSpec, strips: int) -> int:
    """Strips of one claim."""
    if spec.mode == "many" and not spec.goes_down:
        return 1
    if spec.mode == "many" or not spec.goes_down:
        return cpu_team.strips_at_once(strips)
    outputs = _WIDE_OUTPUTS_OF_INDEX if spec.format.index else _WIDE_OUTPUTS
    return cpu_team.strips_at_once(strips, outputs // spec.strip)


@cache
def _kernel(spec: MatmulSpec) -> Any:
    # formats of two files may have one name
    told = type(spec.format).__module__, spec
    return cpu_jit.compiled("matmul", told, partial(build_matmul, spec))


@cache
def _arrange_kernel(spec: MatmulSpec, block: int) -> Any:
    """What puts rows in order, and sums every `block` inputs of them unless that is 0."""
    assert has_halves(block), f"a block of {block} inputs has no order of halves"
    order, lines = spec.format.order, spec.mode == "tiles"
    arranged = ArrangeSpec(spec.dot, spec.rows, block, spec.lanes, order, lines)
    return cpu_jit.compiled("arrange", arranged, partial(build_arrange, arranged))
