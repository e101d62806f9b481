"""Packed weights in the frame of cpu_dot_ir: codes become pairs of bfloat16 in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_dot_ir import LANES, Products
from specexec_kernels.cpu_ir_emit import I64, build_module
from specexec_kernels.cpu_ir_unpack import Arg as PackedArg
from specexec_kernels.cpu_ir_unpack import KernelSpec, Unpacker
from specexec_kernels.cpu_panels_ir import PanelShape
from specexec_kernels.cpu_tiles_ir import TILE_ROWS

Pair = Callable[[list[list[Any]], int, int], Any]
# In tiles a claim has so many strips where X has few rows, since long parts of a row of words are
# read faster; then words of fewer rows ahead are asked for.
WIDE_STRIPS = 256
_WIDE_PREFETCH_ROWS = 8


class PackedDot(Products, Unpacker):
    """Packed weights of 2, 3, 4 and 8 bits; groups are whole runs of inputs."""

    def __init__(self, spec: KernelSpec, block: int, function: ir.Function) -> None:
        """With `block` inputs to a block: a group, or a part of one that divides it."""
        Unpacker.__init__(self, spec, function)
        self.unit_pairs = spec.unit_codes // 2
        self.block_units = block // spec.unit_codes
        # Codes of these bits are looked up as they are where all zero points lie in their middle.
        self.has_middle = spec.mode == "tiles" and spec.bits in (2, 4) and not spec.awq
        self.begin(self.arg, PackedArg)
        if spec.mode == "tiles" and spec.rows <= TILE_ROWS:
            self.prefetch_rows = _WIDE_PREFETCH_ROWS
        if spec.mode == "many":
            self.reserve_block()
        permute = ir.FunctionType(self.shorts, [self.shorts, self.shorts])
        self._permute = ir.Function(
            self.b.function.module, permute, "llvm.x86.avx512.permvar.hi.512"
        )

    def tile(self, start: Any, stop: Any) -> None:
        def block(first: Any, _: list[Any]) -> list[Any]:
            return self.loop(start, stop, 1, [], lambda strip, _: self.block_of(strip, first))

        self.loop(I64(0), self.units, self.block_units, [], block)

    def panel_shape(self) -> PanelShape:
        pairs = self.block_units * self.unit_pairs
        return PanelShape(
            rows=self.spec.rows, vectors=self.spec.vectors, pairs=pairs, block_pairs=pairs,
            few_totals=WIDE_STRIPS if self.spec.rows <= TILE_ROWS else WIDE_STRIPS // 2,
            has_scale=True, has_offset=False,
        )  # fmt: skip

    def fill_panel(self, strip: Any, first: Any, last: Any) -> None:
        self.begin_block(strip, first)
        for v, scale in enumerate(self.scales):
            self.store(scale, self.panels.terms, I64(v * LANES))
        self.fill(strip, first, last)

    def begin_block(self, strip: Any, first: Any) -> None:
        """Scale and zero point of each vector of outputs; a block lies in one group."""
        spec, column = self.spec, self.column(strip)
        group = self.b.sdiv(first, self.arg[PackedArg.GROUP_UNITS])
        if spec.awq:
            pairs = self.awq_group(group, *column)
        else:
            both = self.gptq_group(group, column[0])
            pairs = [(self.part(both[0], v), self.part(both[1], v)) for v in range(spec.vectors)]
        self.scales = [scale for scale, _ in pairs]
        if self.has_middle:
            self.is_middle = self.all_equal([zero for _, zero in pairs], 1 << (spec.bits - 1))
        self.zeros = [self.in_both_halves(zero) for _, zero in pairs]

    def part(self, wide: Any, vector: int) -> Any:
        """One vector of a strip that lies in one wide vector."""
        lanes = self.ints(list(range(vector * LANES, (vector + 1) * LANES)))
        return self.b.shuffle_vector(wide, ir.Constant(wide.type, ir.Undefined), lanes)

    def in_both_halves(self, zero: Any) -> Any:
        """Zero points of each lane's two codes."""
        b = self.b
        return b.bitcast(b.or_(zero, b.shl(zero, self.ints([16] * LANES))), self.shorts)

    def fill(self, strip: Any, first: Any, last: Any) -> None:
        b, spec = self.b, self.spec

        def put(pair: Pair) -> None:
            def unit(u: Any, _: list[Any]) -> list[Any]:
                at = b.mul(b.sub(u, first), I64(self.unit_pairs * spec.strip))
                words = self.load_words(u, *self.column(strip))
                for j in range(self.unit_pairs):
                    for v in range(spec.vectors):
                        place = b.add(at, I64(j * spec.strip + v * LANES))
                        self.store(pair(words, j, v), self.block, place)
                return []

            self.loop(first, last, 1, [], unit)

        if not self.has_middle:
            put(self.pair)
            return
        with b.if_else(self.is_middle) as (middle, other):
            with middle:
                put(self.middle_pair)
            with other:
                put(self.pair)

    def all_equal(self, vectors: list[Any], value: int) -> Any:
        """Whether all of some vectors of 16 integers are of one value."""
        b, lanes = self.b, ir.IntType(LANES)
        found = [
            b.bitcast(b.icmp_signed("==", vector, self.ints([value] * LANES)), lanes)
            for vector in vectors
        ]
        for other in found[1:]:
            found[0] = b.and_(found[0], other)
        return b.icmp_signed("==", found[0], lanes(-1))

    def unit_words(self, unit: Any, strip: Any) -> Iterator[list[Any]]:
        words = self.load_words(unit, *self.column(strip))
        for j in range(self.unit_pairs):
            yield [self.pair(words, j, v) for v in range(self.spec.vectors)]

    def middle_pair(self, words: list[list[Any]], j: int, v: int) -> Any:
        """As `pair` where every zero point is the middle code.

        Five bits choose a value; the table repeats after as many entries as there are codes, so
        the bits above the code do not matter.
        """
        b, bits = self.b, self.spec.bits
        n_codes = 1 << bits
        values = [_bfloat_bits(i % n_codes - n_codes // 2) for i in range(2 * LANES)]
        codes = b.bitcast(b.lshr(words[0][v], self.ints([bits * j] * LANES)), self.shorts)
        table = ir.Constant(self.shorts, values)
        return b.bitcast(b.call(self._permute, [table, codes]), self.words)

    def pair(self, words: list[list[Any]], j: int, v: int) -> Any:
        """Codes j and j + unit_pairs less their zero points, as a pair of bfloat16."""
        b, bits = self.b, self.spec.bits
        codes = self.code_pair(words, j, v)
        differences = b.sub(b.bitcast(codes, self.shorts), self.zeros[v])
        if bits <= 4:  # from -16 to 15: five bits that choose from 32 values
            table = ir.Constant(self.shorts, [_bfloat_bits(_signed(i)) for i in range(2 * LANES)])
            return b.bitcast(b.call(self._permute, [table, differences]), self.words)
        wide = b.bitcast(differences, self.words)
        sixteen = self.ints([16] * LANES)
        low = b.ashr(b.shl(wide, sixteen), sixteen)
        low_float, high_float = (
            b.bitcast(self.to_float(half), self.words) for half in (low, b.ashr(wide, sixteen))
        )
        return b.or_(b.lshr(low_float, sixteen), high_float)  # 8 bits: nothing below the upper half

    def code_pair(self, words: list[list[Any]], j: int, v: int) -> Any:
        """Codes j and j + unit_pairs in the halves of each lane."""
        b, spec = self.b, self.spec
        mask = self.ints([(2**spec.bits - 1) * 0x10001] * LANES)
        if spec.awq:  # nibble v of two rows of words, of which four are joined at once
            low, high = words[j][v], words[j + self.unit_pairs][v]
            sixteen = self.ints([16] * LANES)
            if v < 4:
                low, high = b.and_(low, self.ints([0xFFFF] * LANES)), b.shl(high, sixteen)
            else:
                low, high = b.lshr(low, sixteen), b.and_(high, self.ints([-0x10000] * LANES))
            return b.and_(b.lshr(b.or_(low, high), self.ints([4 * (v % 4)] * LANES)), mask)
        if spec.bits == 3:
            low, high = (self.code(words, k, v) for k in (j, j + self.unit_pairs))
            return b.or_(low, b.shl(high, self.ints([16] * LANES)))
        return b.and_(b.lshr(words[0][v], self.ints([spec.bits * j] * LANES)), mask)

    def add_block(self, before: Any, sums: Any, vector: int) -> Any:
        return self.fma(self.scales[vector], sums, before)


def _signed(index: int) -> int:
    """Five bits as a signed number."""
    return index if index < 16 else index - 32


def _bfloat_bits(value: int) -> int:
    """A small integer as the bits of a bfloat16."""
    if value == 0:
        return 0
    exponent = abs(value).bit_length() - 1
    fraction = (abs(value) << (7 - exponent)) & 0x7F
    return (0x8000 if value < 0 else 0) | ((127 + exponent) << 7) | fraction


def build_packed(spec: KernelSpec, block: int, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for packed weights."""
    return build_module(name, lambda function: PackedDot(spec, block, function).emit())
