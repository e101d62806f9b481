"""LLVM IR that converts the codes of packed weights to numbers.

Codes are int32 lanes. The results are float32 lanes or, where the CPU multiplies them, pairs of
bfloat16. Knows nothing of where the bytes lie; cpu_unpack_lines and cpu_unpack_lanes read them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I8, I16, I32, Bfloat, Emitter

# For each of safetensors' dtypes, the LLVM type that it is read as, and its bytes
ITEM_TYPES = {
    "F32": (F32, 4), "F16": (I16, 2), "BF16": (I16, 2), "F8_E4M3": (I8, 1), "F8_E5M2": (I8, 1),
    "F8_E8M0": (I8, 1), "U8": (I8, 1), "I8": (I8, 1), "I32": (I32, 4),
}  # fmt: skip
# The E4M3 number of each code's lower 7 bits
_E4M3 = (
    *(code / 512 for code in range(8)),
    *((1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(8, 127)),
    math.nan,
)

# The levels of 4-bit codes that are whole numbers in a row
_FROM_0, _FROM_MINUS_8 = tuple(range(16)), tuple(range(-8, 8))


class Numbers(Emitter):
    """Emits conversions of int32 lanes."""

    def __init__(self, builder: ir.IRBuilder, lanes: int, dot: bool, byte_tables: bool) -> None:
        """Declares the instructions.

        Args:
            builder: of the kernel.
            lanes: float32 lanes of a vector register.
            dot: whether pairs of bfloat16 are made.
            byte_tables: whether the CPU looks bytes up in tables of 128 entries.
        """
        super().__init__(builder, lanes)
        self.has_byte_tables = dot and byte_tables
        module = builder.function.module
        permute = ir.FunctionType(self.vector, [self.vector, self.words])
        self.pair_type = ir.VectorType(I16, 2 * lanes)
        if lanes == 16:
            self._table = ir.Function(module, permute, "llvm.x86.avx512.permvar.sf.512")
        elif lanes == 8:
            self._table = ir.Function(module, permute, "llvm.x86.avx2.permps")
        if self.has_byte_tables:
            self.bytes_type = ir.VectorType(I8, 4 * lanes)
            bytes_of = ir.FunctionType(self.bytes_type, [self.bytes_type] * 3)
            self._byte_table = ir.Function(module, bytes_of, "llvm.x86.avx512.vpermi2var.qi.512")
        if dot:
            three = ir.FunctionType(self.pair_type, [self.pair_type] * 3)
            self._wide_table = ir.Function(module, three, "llvm.x86.avx512.vpermi2var.hi.512")
            both = ir.FunctionType(self.pair_type, [self.pair_type, self.pair_type])
            self._table_pair = ir.Function(module, both, "llvm.x86.avx512.permvar.hi.512")
            pairs = ir.VectorType(Bfloat(), 2 * lanes)
            narrow = ir.FunctionType(pairs, [self.vector, self.vector])
            self._narrow = ir.Function(module, narrow, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")

    def same(self, value: int) -> Any:
        """A constant vector with an integer in every lane."""
        return self.ints([value] * self.lanes)

    def byte(self, words: Any, number: int) -> Any:
        """Byte `number` of each word."""
        return self.bits(words, 8 * number, 8)

    def nibble(self, words: Any, number: int) -> Any:
        """Nibble `number` of each word, the lowest first."""
        return self.bits(words, 4 * number, 4)

    def bits(self, words: Any, first: int, count: int) -> Any:
        """`count` bits of each word, from bit `first` on."""
        if count == 32:
            return words
        moved = self.b.lshr(words, self.same(first)) if first else words
        return self.b.and_(moved, self.same(2**count - 1))

    def signed_byte(self, words: Any, number: int) -> Any:
        """Byte `number` of each word, sign-extended."""
        moved = self.b.shl(words, self.same(24 - 8 * number)) if number < 3 else words
        return self.b.ashr(moved, self.same(24))

    def signed_bytes(self, words: Any) -> Iterator[Any]:
        """The four signed bytes of each word as pairs of int16: bytes 0 and 2, then 1 and 3."""
        b, pairs = self.b, ir.VectorType(I16, 2 * self.lanes)
        eight = ir.Constant(pairs, [8] * (2 * self.lanes))
        halves = b.bitcast(words, pairs)
        for moved in (b.shl(halves, eight), halves):
            yield b.bitcast(b.ashr(moved, eight), self.words)

    def unsigned_bytes(self, words: list[Any]) -> Iterator[Any]:
        """Words of four signed bytes with 128 added to each byte."""
        return (self.b.xor(word, self.same(0x80808080 - 2**32)) for word in words)

    def bit_of_each_byte(self, words: Any, first: int, to: int) -> Any:
        """Four bits of each word, from bit `first` on, as bit `to` of the word's four bytes.

        Args:
            first: 0 or 4 within one of the word's bytes, which all four bits are of.
        """
        assert first % 4 == 0, f"bits from {first} on lie in two bytes"
        b, each = self.b, ir.VectorType(I8, 4 * self.lanes)
        own = self.ints([4 * lane + first // 8 for lane in range(self.lanes) for _ in range(4)])
        spread = b.shuffle_vector(b.bitcast(words, each), ir.Constant(each, ir.Undefined), own)
        masks = ir.Constant(each, [1 << (first % 8 + bit) for bit in range(4)] * self.lanes)
        is_set = b.icmp_unsigned("==", b.and_(spread, masks), masks)
        bits = b.select(is_set, ir.Constant(each, [1 << to] * each.count),
                        ir.Constant(each, [0] * each.count))  # fmt: skip
        return b.bitcast(bits, self.words)

    def less(self, codes: Any, offset: int) -> Any:
        """int32 lanes from 0 to 255 minus `offset`, as float32.

        A float32 from 2**23 on has the code in its lowest bits. So the code is or-ed into the bits
        of 2**23, and one subtraction of 2**23 + offset does the rest.
        """
        large = self.b.or_(codes, self.same(0x4B000000))
        return self.b.fsub(self.b.bitcast(large, self.vector), self.constant(2.0**23 + offset))

    def half(self, bits: Any) -> Any:
        """The float16 in the lower half of each int32 lane, as float32."""
        narrow = self.b.trunc(bits, ir.VectorType(I16, self.lanes))
        return self.b.fpext(self.b.bitcast(narrow, ir.VectorType(ir.HalfType(), self.lanes)),
                            self.vector)  # fmt: skip

    def floats(self, words: Any, dtype: str) -> tuple[Any, ...]:
        """The float32 numbers in words: one of dtype F32, or two of F16 or BF16, the lower half's
        first."""
        if dtype == "F32":
            return (self.b.bitcast(words, self.vector),)
        upper = self.b.lshr(words, self.same(16))
        if dtype == "F16":
            return self.half(words), self.half(upper)
        return self.bfloat(words), self.bfloat(upper)

    def bfloat(self, bits: Any) -> Any:
        """The bfloat16 in the lower half of each int32 lane, as float32."""
        return self.b.bitcast(self.b.shl(bits, self.same(16)), self.vector)

    def rounded(self, values: Any, dtype: str) -> Any:
        """float32 lanes rounded to a dtype, to nearest even, and back to float32."""
        if dtype == "BF16":
            return self.bfloat(self.bfloat_bits(values))
        if dtype == "F16":
            half = self.b.fptrunc(values, ir.VectorType(ir.HalfType(), self.lanes))
            return self.b.fpext(half, self.vector)
        return values

    def number(self, items: Any, dtype: str) -> Any:
        """Converts items as they lie in memory, one for each lane: floats to float32 lanes,
        integers to int32 lanes, not sign-extended.

        Args:
            items: vector of ITEM_TYPES[dtype].
            dtype: safetensors' name.
        """
        if dtype == "F32":
            return self.b.bitcast(items, self.vector)
        codes = items if items.type.element == I32 else self.b.zext(items, self.words)
        if dtype == "F16":
            return self.half(codes)
        if dtype == "BF16":
            return self.bfloat(codes)
        return self.float8(codes, dtype) if dtype.startswith("F8_E") else codes

    def float8(self, codes: Any, dtype: str) -> Any:
        """Converts float8 codes, int32 lanes from 0 to 255, to float32."""
        b = self.b
        if dtype == "F8_E5M2":
            return self.half(b.shl(codes, self.same(8)))
        if dtype == "F8_E8M0":
            return self.power_of_two(codes)
        sign = b.shl(b.and_(codes, self.same(0x80)), self.same(8))
        magnitude = b.and_(codes, self.same(0x7F))
        # as a float16 it has an exponent 8 too small
        value = self.half(b.or_(sign, b.shl(magnitude, self.same(7))))
        is_nan = b.icmp_signed("==", magnitude, self.same(0x7F))
        nan = self.constant(float("nan"))
        return b.select(is_nan, nan, b.fmul(value, self.constant(256.0)))

    def power_of_two(self, codes: Any) -> Any:
        """2**(code - 127), the scales of MX formats (E8M0), as float32; code 255 is NaN."""
        b = self.b
        normal = b.shl(codes, self.same(23))
        smallest = b.icmp_signed("==", codes, self.same(0))
        is_nan = b.icmp_signed("==", codes, self.same(255))
        bits = b.select(smallest, self.same(1 << 22), normal)
        return b.bitcast(b.select(is_nan, self.same(0x7FC00000), bits), self.vector)

    def table(self, values: tuple[float, ...], codes: Any) -> Any:
        """values[code] as float32, for codes in int32 lanes from 0 to 15."""
        b = self.b
        if self.lanes == 16:
            return b.call(self._table, [ir.Constant(self.vector, values), codes])
        if self.lanes == 8:
            halves = [
                b.call(self._table, [ir.Constant(self.vector, values[i : i + 8]), codes])
                for i in (0, 8)
            ]
            return b.select(b.icmp_signed(">", codes, self.same(7)), halves[1], halves[0])
        result = self.constant(values[0])
        for code in range(1, 16):
            is_code = b.icmp_signed("==", codes, self.same(code))
            result = b.select(is_code, self.constant(values[code]), result)
        return result

    def nibble_level(self, table: tuple[float, ...], words: Any, first: int) -> Any:
        """table[code] as float32, for the 4-bit code from bit `first` of each word on.

        Without a register for 16 values, levels that are whole numbers in a row are converted.
        Those from -8 on are signed nibbles once their highest bits are flipped.
        """
        b = self.b
        if self.lanes == 16 or table not in (_FROM_0, _FROM_MINUS_8):
            return self.table(table, self.bits(words, first, 4))
        if table == _FROM_0:
            return self.to_float(self.bits(words, first, 4))
        flipped = b.xor(words, self.same(0x88888888 - 2**32))
        moved = b.shl(flipped, self.same(28 - first)) if first < 28 else flipped
        return self.to_float(b.ashr(moved, self.same(28)))

    # What follows makes pairs of bfloat16, which only CPUs with 16 lanes multiply.

    def narrow(self, low: Any, high: Any) -> Any:
        """Two vectors of float32, concatenated and rounded to bfloat16, as one vector of words."""
        return self.b.bitcast(self._narrowed(low, high), self.words)

    def _narrowed(self, low: Any, high: Any) -> Any:
        return self.b.call(self._narrow, [high, low])

    def pair(self, first: Any, second: Any) -> Any:
        """Two float32 vectors as one of pairs of bfloat16, rounded to nearest; `first` is in the
        lower halves."""
        narrow = self.b.bitcast(self._narrowed(first, second), self.pair_type)
        order = [half * self.lanes + lane for lane in range(self.lanes) for half in (0, 1)]
        undefined = ir.Constant(narrow.type, ir.Undefined)
        return self.b.bitcast(
            self.b.shuffle_vector(narrow, undefined, self.ints(order)), self.words
        )

    def exact_pair(self, first: Any, second: Any) -> Any:
        """`pair` for numbers that are exact in bfloat16."""
        b = self.b
        low, high = (b.bitcast(number, self.words) for number in (first, second))
        return b.or_(b.lshr(low, self.same(16)), high)

    def table_pair(self, values: tuple[float, ...], words: Any, first: int) -> Any:
        """values[code] as pairs of bfloat16, for the codes in both halves of the words.

        Args:
            values: 16 or 32, exact in bfloat16.
            words: with a code in each half; other bits are ignored.
            first: bit of each half where the code of 4 or 5 bits begins.
        """
        # the instruction reads five bits of each half: 16 values are repeated, so that the fifth
        # bit does not matter
        table = ir.Constant(self.pair_type, [bfloat_bits(v) for v in values * (32 // len(values))])
        moved = self.b.lshr(words, self.same(first)) if first else words
        return self.b.bitcast(
            self.b.call(self._table_pair, [table, self.b.bitcast(moved, self.pair_type)]),
            self.words,
        )

    def float8_pairs(self, words: Any) -> tuple[Any, Any]:
        """The four E4M3 codes of each word as pairs of bfloat16: bytes 0 and 2, then bytes 1 and 3.

        Only where `has_byte_tables`: both bytes of a bfloat16 are looked up by 7 bits of its code.
        """
        b = self.b
        codes = b.bitcast(words, self.bytes_type)
        low, high = (
            b.call(self._byte_table, [self._bytes(_E4M3[:64], at), codes,
                                      self._bytes(_E4M3[64:], at)])
            for at in (0, 8)
        )  # fmt: skip
        low = b.bitcast(low, self.words)
        sign = b.and_(words, self.same(0x80808080 - 2**32))
        high = b.or_(b.bitcast(high, self.words), sign)
        even, odd = self.same(0x00FF00FF), self.same(0xFF00FF00 - 2**32)
        eight = self.same(8)
        first = b.or_(b.and_(low, even), b.and_(b.shl(high, eight), odd))
        second = b.or_(b.and_(b.lshr(low, eight), even), b.and_(high, odd))
        return first, second

    def _bytes(self, values: tuple[float, ...], first: int) -> Any:
        """A constant vector of 8 bits of each value's bfloat16, from bit `first` on."""
        return ir.Constant(self.bytes_type, [bfloat_bits(v) >> first & 0xFF for v in values])

    def wide_table_pair(self, values: tuple[float, ...], words: Any) -> Any:
        """values[code] as pairs of bfloat16, for 64 values and the lowest 6 bits of both halves."""
        bits = [bfloat_bits(value) for value in values]
        low, high = (ir.Constant(self.pair_type, bits[at : at + 32]) for at in (0, 32))
        codes = self.b.bitcast(words, self.pair_type)
        return self.b.bitcast(self.b.call(self._wide_table, [low, codes, high]), self.words)

    def both_bits(self, words: Any, first: int, count: int) -> Any:
        """`count` bits of each half of the words, from bit `first` on."""
        moved = self.b.lshr(words, self.same(first)) if first else words
        return self.b.and_(moved, self.same((2**count - 1) * 0x10001))


def bfloat_bits(value: float) -> int:
    """The bits of the bfloat16 nearest to `value`, which must be a normal number, zero or NaN."""
    bits = int.from_bytes(struct.pack("<f", value), "little")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
