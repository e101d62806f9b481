"""LLVM IR that turns packed words into float32 weights, strip by strip.

Formula: W[k, n] = scale[g, n] * (code[k, n] - zero[g, n]) with g the group of input k. The product
is exact in float32 for fp16 scales, so fma(code, scale, -scale * zero) gives the same bits.
Formats: GPTQ (codes packed down the inputs) and AWQ GEMM (codes packed along the outputs, in the
order 0 2 4 6 1 3 5 7). A strip of GPTQ is `strip` neighbouring columns; a strip of AWQ is `vectors`
nibbles of `lanes` neighbouring words, so its columns are out of order and the caller reorders them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, Literal

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I32, I64, Emitter, ScaleType

Mode = Literal["few", "many", "tiles", "dequantize"]  # tiles: in cpu_dot_ir alone
PREFETCH_ROWS = 24  # of words, ahead of those that are unpacked


class Arg(IntEnum):
    """Positions in the int64 argument array of a kernel; addresses and sizes."""

    COUNTER = 0  # next tile to claim; set to 0 before a call
    WEIGHT = auto()  # int32 qweight
    ZEROS = auto()  # int32 qzeros
    SCALES = auto()  # (groups, outputs)
    GROUPS = auto()  # int32, group of each code, or of each unit of codes; not in cpu_dot_ir
    X = auto()  # float32 (chunks, inputs, rows); unused by dequantize
    CHUNKS = auto()  # chunks of `rows` rows; few: 1
    OUT = auto()  # few, many: float32 (chunks, strips, rows, strip); dequantize: (inputs, stride)
    OUT_STRIDE = auto()  # dequantize: floats per row of the tile
    SCRATCH = auto()  # float32 (strips, groups, 2, strip): scale, and see group_constant; likewise
    UNITS = auto()  # inputs // codes per unit
    WEIGHT_STRIDE = auto()  # int32 words per row of qweight
    ZEROS_STRIDE = auto()  # int32 words per row of qzeros
    COLUMNS = auto()  # GPTQ: outputs; AWQ: words per row
    N_GROUPS = auto()
    FIRST_STRIP = auto()
    END_STRIP = auto()
    STRIPS_AT_ONCE = auto()  # of one claim
    X_BLOCKS = auto()  # in cpu_dot_ir alone
    GROUP_UNITS = auto()  # units of a group; likewise


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What a kernel is compiled for."""

    mode: Mode
    bits: int
    awq: bool
    stored_minus_one: bool  # format v1: fields hold zero - 1
    scale_type: ScaleType
    group_per_code: bool  # arbitrary g_idx; otherwise one group per unit of codes
    rows: int  # of x in a chunk, whose sums are kept in registers or tiles; dequantize: 0
    vectors: int  # vectors of `lanes` columns per strip
    lanes: int
    awq_rows: int = 1  # rows of words in a unit of AWQ

    @property
    def strip(self) -> int:
        """Columns of a strip."""
        return self.vectors * self.lanes

    @property
    def unit_codes(self) -> int:
        """Codes of one column in the smallest whole number of words (AWQ: one per row)."""
        return self.awq_rows if self.awq else (32 if self.bits == 3 else 32 // self.bits)

    @property
    def unit_words(self) -> int:
        """Rows of words of one unit."""
        if self.awq:
            return self.awq_rows
        return 3 if self.bits == 3 else 1

    @property
    def nibble_groups(self) -> int:
        """AWQ: strips that share one block of words."""
        return 8 // self.vectors


class Unpacker(Emitter):
    """Emits the part all kernels share; the arguments are loaded once into SSA values."""

    def __init__(self, spec: KernelSpec, function: ir.Function) -> None:
        super().__init__(ir.IRBuilder(function.append_basic_block("entry")), spec.lanes)
        self.spec = spec
        self.prefetch_rows = PREFETCH_ROWS
        self.base = self.b.ptrtoint(function.args[0], I64)
        self.arg = {a: self.load(self.base, I64(a), I64, 8) for a in Arg}

    def column(self, strip: Any) -> tuple[Any, Any]:
        """First column (AWQ: word) of a strip, and the AWQ strip's first nibble.

        The last strip is moved back to end at the edge: columns it shares with its neighbour
        are computed twice, to the same value.
        """
        b, width = self.b, self.spec.lanes if self.spec.awq else self.spec.strip
        nibble = I64(0)
        if self.spec.awq:
            groups = I64(self.spec.nibble_groups)
            nibble = b.mul(b.urem(strip, groups), I64(self.spec.vectors))
            strip = b.udiv(strip, groups)
        limit = b.sub(self.arg[Arg.COLUMNS], I64(width))
        return self.minimum(b.mul(strip, I64(width)), limit), nibble

    def prepare_strip(self, strip: Any, _: list[Any]) -> list[Any]:
        """Write scale and constant of every group of a strip to the scratch."""
        b, spec = self.b, self.spec
        column, nibble = self.column(strip)
        groups = self.arg[Arg.N_GROUPS]
        first = b.mul(b.mul(strip, groups), I64(2 * spec.strip))

        def group(g: Any, _: list[Any]) -> list[Any]:
            at = b.add(first, b.mul(g, I64(2 * spec.strip)))
            pairs = self.awq_group(g, column, nibble) if spec.awq else [self.gptq_group(g, column)]
            for scale, zero in pairs:
                self.store(scale, self.arg[Arg.SCRATCH], at)
                constant = self.group_constant(scale, zero)
                self.store(constant, self.arg[Arg.SCRATCH], b.add(at, I64(spec.strip)))
                at = b.add(at, I64(spec.lanes))
            return []

        return self.loop(I64(0), groups, 1, [], group)

    def group_constant(self, scale: Any, zero: Any) -> Any:
        """What is kept of a group beside its scale: -scale * zero."""
        return self.b.fneg(self.b.fmul(scale, self.to_float(zero)))

    def gptq_group(self, g: Any, column: Any) -> tuple[Any, Any]:
        """Scales and zeros of one group, all columns of the strip in one wide vector."""
        b, spec = self.b, self.spec
        n_words = spec.strip * spec.bits // 32
        word = b.udiv(b.mul(column, I64(spec.bits)), I64(32))
        at = b.add(b.mul(g, self.arg[Arg.ZEROS_STRIDE]), word)
        words = self.load(self.arg[Arg.ZEROS], at, ir.VectorType(I32, n_words))
        if spec.stored_minus_one and spec.bits != 3:  # whole words, carry included
            ones = sum(1 << (i * spec.bits) for i in range(32 // spec.bits))
            words = b.add(words, self.ints([ones] * n_words))
        bit = [n * spec.bits for n in range(spec.strip)]
        low = self.ints([i // 32 for i in bit])
        high = self.ints([min(i // 32 + 1, n_words - 1) for i in bit])
        undefined = ir.Constant(words.type, ir.Undefined)
        zero = self.field(
            spec.bits,
            b.shuffle_vector(words, undefined, low),
            b.shuffle_vector(words, undefined, high),
            [i % 32 for i in bit],
        )
        if spec.stored_minus_one and spec.bits == 3:  # field by field
            one, mask = (self.ints([v] * spec.strip) for v in (1, 7))
            zero = b.and_(b.add(zero, one), mask)
        at = b.add(b.mul(g, self.arg[Arg.COLUMNS]), column)
        return self.load_scales(spec.scale_type, self.arg[Arg.SCALES], at, spec.strip), zero

    def awq_group(self, g: Any, word: Any, nibble: Any) -> list[tuple[Any, Any]]:
        """Scales and zeros of one group, one vector per nibble of the strip."""
        b, spec = self.b, self.spec
        at = b.add(b.mul(g, self.arg[Arg.ZEROS_STRIDE]), word)
        words = self.shift_to_nibble(self.load(self.arg[Arg.ZEROS], at, self.words), nibble)
        pairs = []
        for v in range(spec.vectors):
            zero = self.field(4, words, words, [4 * v] * spec.lanes)
            row = b.add(b.mul(g, self.arg[Arg.COLUMNS]), word)
            at = b.add(b.mul(row, I64(8)), self.awq_column(b.add(nibble, I64(v))))
            scale = self.load_scales(spec.scale_type, self.arg[Arg.SCALES], at, spec.lanes, 8)
            pairs.append((scale, zero))
        return pairs

    def awq_column(self, nibble: Any) -> Any:
        """Column of a word's nibble: the order is 0 2 4 6 1 3 5 7."""
        even = self.b.shl(self.b.and_(nibble, I64(3)), I64(1))
        return self.b.or_(even, self.b.lshr(nibble, I64(2)))

    def shift_to_nibble(self, words: Any, nibble: Any) -> Any:
        """Bring the strip's first nibble to bit 0."""
        amount = self.b.trunc(self.b.mul(nibble, I64(4)), I32)
        return self.b.lshr(words, self.splat(amount, self.lanes))

    def unit_weights(self, unit: Any, strip: Any) -> Iterator[tuple[Any, list[Any]]]:
        """The weights of one unit of words: (input, one vector of weights per vector)."""
        b, spec = self.b, self.spec
        words = self.load_words(unit, *self.column(strip))
        group = None if spec.group_per_code else self.scale_pairs(unit, strip)
        for j in range(spec.unit_codes):
            code = b.add(b.mul(unit, I64(spec.unit_codes)), I64(j))
            pairs = group or self.scale_pairs(code, strip)
            yield code, [self.weight(words, j, v, pairs[v]) for v in range(spec.vectors)]

    def load_words(self, unit: Any, column: Any, nibble: Any) -> list[list[Any]]:
        """Packed words of a unit, [word][vector]; AWQ has one vector for all nibbles."""
        b, spec = self.b, self.spec
        weight, stride = self.arg[Arg.WEIGHT], self.arg[Arg.WEIGHT_STRIDE]
        width = spec.lanes if spec.awq else spec.strip
        rows = []
        for i in range(spec.unit_words):
            row = b.add(b.mul(unit, I64(spec.unit_words)), I64(i))
            at = b.add(b.mul(row, stride), column)
            later = b.add(at, b.mul(I64(self.prefetch_rows), stride))
            for line in range(0, width, 16):
                self.prefetch(weight, b.add(later, I64(line)))
            if spec.awq:
                word = self.shift_to_nibble(self.load(weight, at, self.words), nibble)
                rows.append([word] * spec.vectors)
                continue
            places = [b.add(at, I64(v * spec.lanes)) for v in range(spec.vectors)]
            rows.append([self.load(weight, place, self.words) for place in places])
        return rows

    def scale_pairs(self, index: Any, strip: Any) -> list[tuple[Any, Any]]:
        """(scale, constant) per vector, of the group at `index` of the group table."""
        b, spec = self.b, self.spec
        group = b.sext(self.load(self.arg[Arg.GROUPS], index, I32), I64)
        row = b.add(b.mul(strip, self.arg[Arg.N_GROUPS]), group)
        at = b.mul(row, I64(2 * spec.strip))
        pairs = []
        for v in range(spec.vectors):
            here = b.add(at, I64(v * spec.lanes))
            scale = self.load(self.arg[Arg.SCRATCH], here, self.vector)
            offset = self.load(self.arg[Arg.SCRATCH], b.add(here, I64(spec.strip)), self.vector)
            pairs.append((scale, offset))
        return pairs

    def weight(self, words: list[list[Any]], j: int, v: int, pair: tuple[Any, Any]) -> Any:
        """The weights of code j of the unit, vector v."""
        return self.fma(self.to_float(self.code(words, j, v)), *pair)

    def code(self, words: list[list[Any]], j: int, v: int) -> Any:
        """Code j of the unit, vector v."""
        bits = self.spec.bits
        bit = 4 * v if self.spec.awq else j * bits
        low = words[bit // 32][v]
        high = words[min(bit // 32 + 1, len(words) - 1)][v]
        return self.field(bits, low, high, [bit % 32] * self.lanes)

    def broadcast(self, base: Any, index: Any) -> Any:
        """The float32 at element `index` in every lane."""
        return self.splat(self.load(base, index, F32), self.lanes)
