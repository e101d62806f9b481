"""Chooses the kernel for a number of rows and a weight, and lays rows and results out for it.

Weights of the same format and shape share a plan, which is made once: in a pass of one row, what
Python does around a product takes as long as the product itself.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Hashable
from functools import cache, lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team
from specexec_kernels.cpu_arrange_int8 import build_eight_bit_arrange
from specexec_kernels.cpu_arrange_int16 import build_whole_arrange
from specexec_kernels.cpu_arrange_ir import ArrangeSpec, build_arrange
from specexec_kernels.cpu_ir_emit import Quads, ScaleType
from specexec_kernels.cpu_matmul_ir import build_matmul
from specexec_kernels.cpu_matmul_spec import (
    AT_ONCE,
    OUTPUTS,
    PARTS,
    ROUNDED_INPUTS,
    SCRATCH,
    STRIPS,
    UNITS,
    X_SUMS,
    MatmulSpec,
    X,
)
from specexec_kernels.cpu_quads_ir import MOST_BITS, lowered_by
from specexec_kernels.cpu_tiles_ir import TILE_PAIRS
from specexec_kernels.formats.base import PackedFormat, PackedWeight, has_halves

# Sizes of a chunk, in rows. With two vectors of outputs, 13 rows fill 32 vector registers, and 6
# rows fill the 16 registers of AVX2.
_CHUNKS, _CHUNKS_OF_16 = (1, 2, 4, 8, 10, 13), (1, 2, 4, 6)
_CHUNKS_OF_PAIRS = (1, 2, 4, 8, 10, 12)  # where an instruction multiplies two rows at once
_FEW = 4  # up to this many rows are multiplied in registers, whatever the format
# The most products per unit of a "few" kernel of more than _FEW rows: each of them is an
# instruction of its own in the code.
_MOST_WRITTEN_OUT = 416
LEAST_ROUNDED = 16  # the fewest inputs of a block for which rows are rounded to 8 bits
# In tile registers: the sizes of a chunk, in rows, and the number of rows from which on chunks have
# 32 rows.
_TILE_ROWS, _FEWEST_OF_32 = (1, 2, 4, 8, 16), 97
# In tile registers: up to this many rows a product waits for memory, and strips of one vector are
# read faster. The second number is for formats with `fetches_early`.
_NARROW_ROWS, _NARROW_ROWS_OF_WIDE = 64, 128
# The most outputs of a claim where codes go down the inputs: a long stretch of a line is read
# faster. Fewer in a format with an index, where the terms of all groups are in the caches too.
_WIDE_OUTPUTS, _WIDE_OUTPUTS_OF_INDEX = 8192, 4096
# The most plans that are kept; when there are this many, all are dropped. A server's prompts have
# every number of rows, and products of activations (cpu_chains) change size with every token.
_MOST_PLANS = 4096


def plan_for(rows: torch.dtype, count: int, weight: PackedWeight) -> Plan | None:
    """How `count` rows of a dtype are multiplied by a weight; None where no kernel reads it.

    Args:
        rows: dtype of the rows.
        count: number of rows, at least 1.
    """
    dot, eight = multiplies_pairs(rows), weight.eight_bit_rows
    kind = weight.format, weight.in_features, weight.out_features, eight
    key = rows, dot, count, kind, torch.get_num_threads()
    if key not in _plans:
        if len(_plans) == _MOST_PLANS:
            _plans.clear()
        _plans[key] = _made(rows, dot, count, weight)
    return _plans[key]


def multiplies_pairs(rows: torch.dtype) -> bool:
    """Whether rows of a dtype are multiplied as pairs of bfloat16 on this CPU, be it in vector or
    in tile registers."""
    return rows == torch.bfloat16 and cpu_jit.has_dot() and cpu_jit.has_matmul(torch.bfloat16)


def reads(weight: PackedWeight) -> bool:
    """Whether the kernels read a weight: its inputs must be whole units, and its outputs at least
    one vector."""
    fits = weight.in_features % weight.format.unit == 0
    wide = weight.out_features >= cpu_jit.lanes()
    return weight.format.compiled and fits and wide and sys.byteorder == "little"


class Plan:
    """How rows of one dtype are multiplied by weights of one format and shape.

    Attributes:
        dtype: to which rows are converted before they are arranged.
        rows: rows of a chunk.
        outputs: of the weight.
        kernel: the compiled function.
        claims: how many claims the strips come to, so the most threads that find work.
        arguments: of the kernel; all addresses and the number of chunks are still 0.
    """

    def __init__(self, spec: MatmulSpec, inputs: int, outputs: int, rows: torch.dtype) -> None:
        """Makes the plan for weights (outputs, inputs) that `reads` accepts."""
        narrow = spec.dot or spec.whole == 16 or (spec.whole and rows == torch.bfloat16)
        self.dtype = torch.bfloat16 if narrow else torch.float32
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
        self._sum_inputs = spec.block if spec.has_offset or spec.whole else 0
        self._sums = -(-inputs // self._sum_inputs) if self._sum_inputs else 0  # of a row
        self._items = inputs // spec.per_item
        self._scratch = 0  # float32 numbers
        if spec.format.index:
            groups = -(-inputs // spec.format.index[1])
            self._scratch = self._strips * groups * 2 * spec.strip

    def arrange(self, x: Tensor, chunks: int) -> dict[int, Tensor]:
        """Puts rows into the order in which the kernel reads them.

        Args:
            x: (rows, inputs) of `dtype`. The last chunk may have more places than there are rows
                left; they are filled with zeros.
            chunks: number of chunks.
        Returns:
            (chunks, numbers) tensors, each under the position of its address in the arguments.
        """
        x = x.contiguous()
        items, sums = self.arranged(chunks)
        # in the order of cpu_arrange_ir's argument positions
        table = array("q", (0, x.data_ptr(), *x.shape))
        table.extend((items.data_ptr(), sums.data_ptr(), chunks))
        cpu_team.run(self.arrange_kernel, table.buffer_info()[0], chunks)
        return {X: items, X_SUMS: sums}

    def arranged(self, chunks: int) -> tuple[Tensor, Tensor]:
        """Memory for arranged rows, and for the sums of their blocks; both (chunks, numbers)."""
        items = torch.empty(chunks, self.rows * self._items, dtype=torch.int32)
        return items, torch.empty(chunks, self.rows * self._sums * self._spec.x_terms)

    @property
    def arrange_kernel(self) -> Any:
        """The compiled function that arranges rows (cpu_arrange_ir). Plans of weights with as many
        inputs that have the same one can share arranged rows."""
        return _arrange_kernel(self._spec, self._sum_inputs, self.dtype)

    @property
    def has_plain_sums(self) -> bool:
        """Whether `sums` need no `flat`, and the kernel no scratch: then column n of the results'
        row is output n."""
        return self.outputs % self._spec.strip == 0 and not self._scratch

    @property
    def adds(self) -> bool:
        """Whether the kernel adds to what is in `sums`, tile by tile, so that zeros must be there;
        others store each sum once."""
        return self._spec.mode == "many"

    def sums(self, chunks: int) -> Tensor:
        """Memory for the results, (chunks, rows of a chunk, outputs of all strips) float32."""
        make = torch.zeros if self.adds else torch.empty
        return make(chunks, self.rows, self._strips * self._spec.strip)

    def scratch(self) -> dict[int, Tensor]:
        """Further memory that one call needs, under the position of its address in the arguments;
        none where the format has no index."""
        return {SCRATCH: torch.empty(self._scratch)} if self._scratch else {}

    def flat(self, sums: Tensor) -> Tensor:
        """The results of `sums` as (rows of all chunks, outputs).

        The last strip ends at the last output, so it may begin with outputs of the strip before it;
        those columns are left out.
        """
        flat = sums.view(-1, sums.shape[2])
        rest = self.outputs % self._spec.strip
        if not rest:
            return flat
        return torch.cat([flat[:, : self.outputs - rest], flat[:, flat.shape[1] - rest :]], dim=1)


_plans: dict[Hashable, Plan | None] = {}


def multiplies_integers(rows: torch.dtype, fmt: PackedFormat) -> bool:
    """Whether rows of a dtype are multiplied by a format's weights as pairs of int16, with int32
    sums: where the CPU has no instruction for pairs of bfloat16, which are as fast."""
    small = fmt.zero is not None and not fmt.index and has_halves(fmt.block)
    return small and rows == torch.bfloat16 and not multiplies_pairs(rows) and cpu_jit.has_int16()


def rounds_rows(fmt: PackedFormat) -> bool:
    """Whether rows can be rounded to 8 bits for a format's weights, which must be integers of
    groups that neighbours share."""
    fits = fmt.zero is not None and not fmt.index and has_halves(fmt.block)
    there = cpu_jit.has_int16() or _quads(fmt, 1) is not None
    return fits and fmt.block >= LEAST_ROUNDED and there


def _quads(fmt: PackedFormat, rows: int) -> Quads | None:
    """The instruction that multiplies four inputs of `rows` rows at a time by a format's codes."""
    kind = cpu_jit.quads()
    if kind == "smmla" and (rows == 1 or fmt.unit % 8 or fmt.block % 8):  # it takes two of both
        kind = "sdot"
    fits = kind and fmt.unit % 4 == 0 and fmt.code_bits <= MOST_BITS[kind]
    return kind if fits else None


def _made(rows: torch.dtype, dot: bool, count: int, weight: PackedWeight) -> Plan | None:
    if not reads(weight):
        return None
    inputs, outputs = weight.in_features, weight.out_features
    fmt = weight.format.for_rows(rows, pairs=dot)
    whole: Literal[0, 8, 16] = 16 if multiplies_integers(rows, fmt) else 0
    # rows are arranged in whole runs, each of which has a place for all of its blocks
    whole_runs = fmt.block >= ROUNDED_INPUTS or inputs % ROUNDED_INPUTS == 0
    if weight.eight_bit_rows and rounds_rows(fmt) and whole_runs:
        dot, whole = False, 8
    spec = _spec(fmt, dot, count, inputs, outputs, whole)
    return _plan(spec, inputs, outputs, rows, torch.get_num_threads())


@lru_cache(_MOST_PLANS)
def _plan(spec: MatmulSpec, inputs: int, outputs: int, rows: torch.dtype, threads: int) -> Plan:
    return Plan(spec, inputs, outputs, rows)


def _spec(
    fmt: PackedFormat, dot: bool, count: int, inputs: int, outputs: int, whole: Literal[0, 8, 16]
) -> MatmulSpec:
    lanes, byte_tables = cpu_jit.lanes(), bool(cpu_jit.features().get("avx512vbmi"))
    if dot and _fits_tiles(fmt, inputs):
        narrow = _NARROW_ROWS_OF_WIDE if fmt.fetches_early else _NARROW_ROWS
        most = 1 if count <= narrow and not fmt.goes_down else 2
        vectors = _vectors(most, outputs)
        return MatmulSpec(fmt, dot, _tile_rows(count), vectors, lanes, "tiles", byte_tables)
    quads = _quads(fmt, count) if whole == 8 else None
    size = chunk_rows(count, in_pairs=quads == "smmla")
    unit_items = fmt.unit // (4 if quads else 2 if dot or whole else 1)
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
    mode: Literal["few", "many"] = "few" if few else "many"
    return MatmulSpec(fmt, dot, size, vectors, lanes, mode, byte_tables, whole, quads)


def _fits_tiles(fmt: PackedFormat, inputs: int) -> bool:
    """Whether weights of a format are multiplied in tile registers (cpu_tiles_ir).

    That does not depend on the number of rows, since the two ways of multiplying pairs round
    differently.
    """
    tile = 2 * TILE_PAIRS  # inputs; a block must be whole tiles, or divide one
    fits = fmt.block % tile == 0 or tile % fmt.block == 0
    return fits and inputs % tile == 0 and cpu_jit.has_tiles()


def _tile_rows(count: int) -> int:
    """Rows of a chunk in tile registers."""
    if count >= _FEWEST_OF_32:
        return 32
    return next((size for size in _TILE_ROWS if size >= count), _TILE_ROWS[-1])


def chunk_rows(count: int, *, in_pairs: bool = False) -> int:
    """Rows of a chunk for `count` rows: the size that leaves the fewest places of the last chunk
    empty, and of equals the largest.

    Args:
        in_pairs: whether two rows are multiplied at once.
    """
    sizes = _CHUNKS_OF_16 if cpu_jit.lanes() == 8 else _CHUNKS
    sizes = _CHUNKS_OF_PAIRS if in_pairs else sizes
    if count <= sizes[-1]:
        return next(size for size in sizes if size >= count)
    return min(sizes[-3:], key=lambda size: (-(-count // size) * size, -size))


def _most_vectors(rows: int) -> int:
    """The most vectors of outputs for which the sums of `rows` rows, the weights, one row's input
    and one more register fit the vector registers."""
    registers = 16 if cpu_jit.lanes() == 8 else 32  # AVX2 has 16, AVX-512 and NEON 32
    return (registers - 2) // (rows + 1)


def _vectors(most: int, outputs: int) -> int:
    """Vectors of outputs in a strip: 4, 2 or 1, at most `most` and as many as the outputs fill."""
    return next((n for n in (4, 2) if n <= most and n * cpu_jit.lanes() <= outputs), 1)


def _strips_at_once(spec: MatmulSpec, strips: int) -> int:
    """How many strips a thread claims at once."""
    if spec.mode == "many" and not spec.goes_down:
        return 1
    if spec.mode == "many" or not spec.goes_down:
        return cpu_team.strips_at_once(strips)
    outputs = _WIDE_OUTPUTS_OF_INDEX if spec.format.index else _WIDE_OUTPUTS
    return cpu_team.strips_at_once(strips, outputs // spec.strip)


@cache
def _kernel(spec: MatmulSpec) -> Any:
    # formats of two modules may have the same class name
    told = type(spec.format).__module__, spec
    return cpu_jit.compiled("matmul", told, partial(build_matmul, spec))


@cache
def _arrange_kernel(spec: MatmulSpec, block: int, rows: torch.dtype) -> Any:
    """The kernel that arranges rows, and sums every `block` inputs of them unless that is 0."""
    assert has_halves(block), f"a block of {block} inputs has no order of halves"
    order, zero, build = spec.format.order, None, build_arrange
    eight: ScaleType | None = None
    if spec.whole:
        order, zero, build = spec.format.integer_order, spec.format.zero, build_whole_arrange
    if spec.whole == 8:
        eight, build = "float32" if rows == torch.float32 else "bfloat16", build_eight_bit_arrange
    if spec.quads:
        zero = spec.format.quad_zero - lowered_by(spec.quads, spec.format.code_bits)
        order = spec.format.quad_order
    lines = spec.mode == "tiles"
    arranged = ArrangeSpec(
        spec.dot, spec.rows, block, spec.lanes, order, lines, zero, eight, spec.quads is not None
    )
    return cpu_jit.compiled("arrange", arranged, partial(build, arranged))
