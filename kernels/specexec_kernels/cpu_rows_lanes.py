"""What formats of row-packed weights emit their LLVM IR with: bytes of one unit, a lane per output.

Neighbouring inputs of an output are neighbouring bytes, so the packed words of as many outputs as a
register has lanes are transposed before they are unpacked: there are fewer of them than of weights.
cpu_rows_ir multiplies with what comes out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I8, I16, I32, I64, Bfloat, Emitter
from specexec_kernels.formats.base import Part, RowFormat

# Positions in the int64 argument array; behind them two for each part: its address, its columns
COUNTER, X, X_SUMS, CHUNKS, OUT, UNITS, OUTPUTS, STRIPS, AT_ONCE, PARTS = range(10)
AHEAD_BYTES = 512  # of an output's weights that are asked for before they are unpacked
TILE_INPUTS = 128  # at least, of a tile in the L1 cache
ITEM_TYPES = {
    "F32": (F32, 4), "F16": (I16, 2), "BF16": (I16, 2), "F8_E4M3": (I8, 1), "F8_E5M2": (I8, 1),
    "F8_E8M0": (I8, 1), "U8": (I8, 1), "I8": (I8, 1), "I32": (I32, 4),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What a kernel is compiled for."""

    format: RowFormat
    dot: bool  # pairs of bfloat16; otherwise float32
    rows: int  # of a chunk
    vectors: int  # of outputs in a strip
    lanes: int
    few: bool  # one chunk, multiplied from the registers

    @property
    def strip(self) -> int:
        """Outputs of a strip."""
        return self.vectors * self.lanes

    @property
    def per_item(self) -> int:
        """Inputs of an item."""
        return 2 if self.dot else 1

    @property
    def tile_units(self) -> int:
        """Units of a tile: whole blocks."""
        block = max(self.format.block, self.format.unit)
        return block * max(TILE_INPUTS // block, 1) // self.format.unit

    @property
    def unit_blocks(self) -> int:
        """Blocks that begin in a unit."""
        return max(self.format.unit // self.format.block, 1)

    @property
    def block_units(self) -> int:
        """Units that a block reaches over."""
        return max(self.format.block // self.format.unit, 1)


class Lanes(Emitter):
    """What a format emits its IR with: the bytes of one unit, one lane for each output.

    Attributes:
        unit: the unit's number, counted from the first input.
        row: the output in the first lane.
    """

    def __init__(self, spec: RowSpec, function: ir.Function) -> None:
        super().__init__(ir.IRBuilder(function.append_basic_block("entry")), spec.lanes)
        self.spec = spec
        self.base = self.b.ptrtoint(function.args[0], I64)
        self.parts: dict[str, tuple[Part, Any, Any]] = {}
        for number, part in enumerate(spec.format.parts):
            at = PARTS + 2 * number
            self.parts[part.leaf] = part, self.argument(at), self.argument(at + 1)
        self.units = self.argument(UNITS)
        self.unit: Any = None
        self.row: Any = None
        module = function.module
        permute = ir.FunctionType(self.vector, [self.vector, self.words])
        self.pair_type = ir.VectorType(I16, 2 * self.lanes)
        if self.lanes == 16:
            self._table = ir.Function(module, permute, "llvm.x86.avx512.permvar.sf.512")
        elif self.lanes == 8:
            self._table = ir.Function(module, permute, "llvm.x86.avx2.permps")
        self._read: dict[Any, Any] = {}  # see `once`
        if spec.dot:
            three = ir.FunctionType(self.pair_type, [self.pair_type] * 3)
            self._wide_table = ir.Function(module, three, "llvm.x86.avx512.vpermi2var.hi.512")
            both = ir.FunctionType(self.pair_type, [self.pair_type, self.pair_type])
            self._table_pair = ir.Function(module, both, "llvm.x86.avx512.permvar.hi.512")
            pairs = ir.VectorType(Bfloat(), 2 * self.lanes)
            narrow = ir.FunctionType(pairs, [self.vector, self.vector])
            self._narrow = ir.Function(module, narrow, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")

    def at(self, row: Any, unit: Any) -> None:
        """Go to a unit of the outputs from `row` on."""
        self.row, self.unit = row, unit

    def argument(self, position: int) -> Any:
        """An int64 of the argument array."""
        return self.load(self.base, I64(position), I64, 8)

    # Reading

    def once(self, key: object, read: Callable[[], Any]) -> Any:
        """What `read` emits, emitted once for the unit: values and terms may share bytes.

        Args:
            key: by which it is known.
        """
        place = id(self.unit), id(self.row), id(self.b.block), key
        if place not in self._read:
            # with what it is known by, so that no other takes its identity
            self._read[place] = read(), self.unit, self.row, self.b.block
        return self._read[place][0]

    def _unit_bytes(self, part: Part) -> int:
        """Bytes of a unit in one output's run of a tensor."""
        return part.items * ITEM_TYPES[part.dtype][1] * self.spec.format.unit // part.inputs

    def _address(self, leaf: str, offset: int) -> tuple[Any, Any]:
        """Address of byte `offset` of the unit, in the first lane; bytes from lane to lane."""
        b, (part, base, _) = self.b, self.parts[leaf]
        n_bytes = self._unit_bytes(part)
        stride = b.mul(self.units, I64(n_bytes))
        local = b.add(b.mul(self.unit, I64(n_bytes)), I64(offset))
        return b.add(base, b.add(b.mul(self.row, stride), local)), stride

    def read_words(self, leaf: str, offset: int = 0, count: int | None = None) -> list[Any]:
        """`count` little-endian words from byte `offset` of the unit on, int32 lanes each.

        Args:
            count: as many as the unit has, unless told.
        """
        if count is None:
            count = self._unit_bytes(self.parts[leaf][0]) // 4
        return self.once((leaf, offset, count), lambda: self._words(leaf, offset, count))

    def _words(self, leaf: str, offset: int, count: int) -> list[Any]:
        first, stride = self._address(leaf, offset)
        found: list[Any] = []
        while len(found) < count:
            size = min(1 << ((count - len(found)).bit_length() - 1), self.lanes)
            found += self._words_at(self.b.add(first, I64(4 * len(found))), stride, size)
        return found

    def _words_at(self, first: Any, stride: Any, count: int) -> list[Any]:
        """`count` words, a power of two up to the lanes, as vectors of one word of each lane."""
        b = self.b
        runs = []
        for lane in range(self.lanes):
            at = b.add(first, b.mul(stride, I64(lane)))
            runs.append(b.load(b.inttoptr(at, ir.PointerType()), typ=ir.VectorType(I32, count),
                               align=1))  # fmt: skip
        # rows i, i + count, i + 2 * count, ... side by side: count x count words to transpose each
        rows = [self._joined(runs[i::count]) for i in range(count)]
        return self.transpose(rows)

    def _joined(self, runs: list[Any]) -> Any:
        """Vectors one behind the other."""
        while len(runs) > 1:
            width = 2 * runs[0].type.count
            order = self.ints(list(range(width)))
            pairs = zip(runs[::2], runs[1::2], strict=True)
            runs = [self.b.shuffle_vector(low, high, order) for low, high in pairs]
        return runs[0]

    def read_halfword(self, leaf: str, offset: int) -> Any:
        """The two bytes from byte `offset` of the unit on, int32 lanes."""
        return self._narrow_items(*self._address(leaf, offset), I16)

    def read_byte(self, leaf: str, offset: int) -> Any:
        """The byte at `offset` of the unit, int32 lanes."""
        return self._narrow_items(*self._address(leaf, offset), I8)

    def _narrow_items(self, first: Any, stride: Any, typ: Any) -> Any:
        items = [self.b.add(first, self.b.mul(stride, I64(lane))) for lane in range(self.lanes)]
        return self._widened(self._gathered(items, typ))

    def _gathered(self, addresses: list[Any], typ: Any) -> Any:
        """One item of each lane."""
        vector = ir.Constant(ir.VectorType(typ, self.lanes), ir.Undefined)
        for lane, at in enumerate(addresses):
            one = self.b.load(self.b.inttoptr(at, ir.PointerType()), typ=typ, align=1)
            vector = self.b.insert_element(vector, one, I32(lane))
        return vector

    def _widened(self, items: Any) -> Any:
        return items if items.type.element == I32 else self.b.zext(items, self.words)

    def item(self, leaf: str, number: int = 0) -> Any:
        """The item of a tensor beside that covers the unit, in each lane.

        Args:
            number: where several items cover a unit, which of them.
        Returns:
            float32 lanes; int32 lanes of a tensor of integers, whose sign is not carried on.
        """
        b, (part, base, columns) = self.b, self.parts[leaf]
        typ, size = ITEM_TYPES[part.dtype]
        if part.outputs == 1 and 0 < part.inputs < self.spec.format.unit:
            bits = 8 * size
            if self._unit_bytes(part) % 4 == 0:  # whole words are fewer loads
                words, place = self.read_words(leaf), number * bits
                return self._number(self.bits(words[place // 32], place % 32, bits), part.dtype)
        column = self._column(part, number)

        def address(row: Any) -> Any:
            place = b.add(b.mul(row, columns), column)
            return b.add(base, b.mul(place, I64(size)))

        def one(at: Any) -> Any:
            return self.splat(b.load(b.inttoptr(at, ir.PointerType()), typ=typ, align=1),
                              self.lanes)  # fmt: skip

        if part.outputs == 0:
            return self._number(one(address(I64(0))), part.dtype)
        if part.outputs == 1:
            if part.inputs == 0:
                at = b.inttoptr(address(self.row), ir.PointerType())
                return self._number(
                    b.load(at, typ=ir.VectorType(typ, self.lanes), align=1), part.dtype
                )
            rows = [b.add(self.row, I64(lane)) for lane in range(self.lanes)]
            return self._number(self._gathered([address(row) for row in rows], typ), part.dtype)
        tiles = [
            b.udiv(b.add(self.row, I64(lane)), I64(part.outputs)) for lane in range(self.lanes)
        ]
        same = b.icmp_signed("==", tiles[0], tiles[-1])
        with b.if_else(same) as (in_one, in_several):
            with in_one:
                uniform, where = one(address(tiles[0])), b.block
            with in_several:
                mixed, elsewhere = self._gathered([address(row) for row in tiles], typ), b.block
        items = b.phi(uniform.type)
        items.add_incoming(uniform, where)
        items.add_incoming(mixed, elsewhere)
        return self._number(items, part.dtype)

    def _column(self, part: Part, number: int) -> Any:
        """The column of a tensor in which the unit's item lies."""
        b, unit = self.b, self.spec.format.unit
        if part.inputs == 0:
            return I64(0)
        if part.inputs < unit:
            return b.add(b.mul(self.unit, I64(unit // part.inputs)), I64(number))
        return b.udiv(self.unit, I64(part.inputs // unit))

    def column(self, leaf: str, number: int = 0) -> Any:
        """The column of a tensor beside in which the unit's item lies; see item."""
        return self._column(self.parts[leaf][0], number)

    def number_at(self, leaf: str, place: int) -> Any:
        """The int32 that a tensor beside has for an input of the unit, as a column."""
        at = self.b.add(self.b.mul(self.unit, I64(self.spec.format.unit)), I64(place))
        return self.b.sext(self.load(self.parts[leaf][1], at, I32), I64)

    def item_of_column(self, leaf: str, column: Any) -> Any:
        """The items of each lane's output in a column of a tensor beside, as float32."""
        b, (part, base, columns) = self.b, self.parts[leaf]
        typ, size = ITEM_TYPES[part.dtype]
        places = [
            b.add(b.mul(b.add(self.row, I64(lane)), columns), column) for lane in range(self.lanes)
        ]
        addresses = [b.add(base, b.mul(place, I64(size))) for place in places]
        return self._number(self._gathered(addresses, typ), part.dtype)

    def column_bits(self, leaf: str, bits: int, column: Any) -> Any:
        """A code of each lane out of words that go down the outputs, int32 lanes.

        Args:
            leaf: (outputs * bits / 32, columns) int32, codes of 1, 2, 4 or 8 bits.
        """
        b, (_, base, columns) = self.b, self.parts[leaf]
        rows = [b.add(self.row, I64(lane)) for lane in range(self.lanes)]
        places = [b.add(b.mul(b.udiv(row, I64(32 // bits)), columns), column) for row in rows]
        words = self._gathered([b.add(base, b.mul(place, I64(4))) for place in places], I32)
        shifts = ir.Constant(self.words, ir.Undefined)
        for lane, row in enumerate(rows):
            shift = b.trunc(b.mul(b.urem(row, I64(32 // bits)), I64(bits)), I32)
            shifts = b.insert_element(shifts, shift, I32(lane))
        return b.and_(b.lshr(words, shifts), self.same(2**bits - 1))

    def run_item(self, leaf: str, skipped: int = 0) -> Any:
        """The float32 of a tensor beside that covers the unit's inputs behind the first `skipped`,
        rows taken as one long run."""
        b, (part, base, _) = self.b, self.parts[leaf]
        unit = I64(self.spec.format.unit)
        inputs = b.mul(self.units, unit)
        first = b.add(b.mul(self.unit, unit), I64(skipped))
        rows = [b.add(self.row, I64(lane)) for lane in range(self.lanes)]
        places = [b.udiv(b.add(b.mul(row, inputs), first), I64(part.run)) for row in rows]
        return self._gathered([b.add(base, b.mul(place, I64(4))) for place in places], F32)

    def lookup(self, leaf: str, codes: Any) -> Any:
        """The float32 of a small tensor beside that each lane's code names."""
        b, (_, base, _) = self.b, self.parts[leaf]
        found = ir.Constant(self.vector, ir.Undefined)
        for lane in range(self.lanes):
            code = b.zext(b.extract_element(codes, I32(lane)), I64)
            found = b.insert_element(found, self.load(base, code, F32), I32(lane))
        return found

    def _number(self, items: Any, dtype: str) -> Any:
        if dtype == "F32":
            return self.b.bitcast(items, self.vector)
        codes = self._widened(items)
        if dtype == "F16":
            return self.half(codes)
        if dtype == "BF16":
            return self.b.bitcast(self.b.shl(codes, self.same(16)), self.vector)
        return self.float8(codes, dtype) if dtype.startswith("F8_E") else codes

    def fetch_ahead(self) -> None:
        """Ask for what of each tensor lies ahead of the unit; at its end, for the next strip's."""
        b = self.b
        for leaf, (part, _, _) in self.parts.items():
            if part.outputs != 1 or part.inputs == 0 or self._unit_bytes(part) < 8:
                continue
            n_bytes = self._unit_bytes(part)
            first, stride = self._address(leaf, AHEAD_BYTES)
            later = b.add(self.unit, I64(-(-AHEAD_BYTES // n_bytes)))
            is_next = b.icmp_signed(">=", later, self.units)
            skipped = b.select(is_next, b.mul(stride, I64(self.lanes - 1)), I64(0))
            for lane in range(self.lanes):
                at = b.add(b.add(first, skipped), b.mul(stride, I64(lane)))
                for line in range(0, n_bytes, 64):
                    self.prefetch(b.add(at, I64(line)), I64(0))

    # Numbers

    def same(self, value: int) -> Any:
        """An integer in every lane."""
        return self.ints([value] * self.lanes)

    def byte(self, words: Any, number: int) -> Any:
        """Byte `number` of each word."""
        return self.bits(words, 8 * number, 8)

    def nibble(self, words: Any, number: int) -> Any:
        """Nibble `number` of each word, the lowest first."""
        return self.bits(words, 4 * number, 4)

    def bits(self, words: Any, first: int, count: int) -> Any:
        """`count` bits of each word from bit `first` on."""
        if count == 32:
            return words
        moved = self.b.lshr(words, self.same(first)) if first else words
        return self.b.and_(moved, self.same(2**count - 1))

    def signed_byte(self, words: Any, number: int) -> Any:
        """Byte `number` of each word as a signed number."""
        moved = self.b.shl(words, self.same(24 - 8 * number)) if number < 3 else words
        return self.b.ashr(moved, self.same(24))

    def half(self, bits: Any) -> Any:
        """int32 lanes whose lower halves are float16, as float32."""
        narrow = self.b.trunc(bits, ir.VectorType(I16, self.lanes))
        return self.b.fpext(self.b.bitcast(narrow, ir.VectorType(ir.HalfType(), self.lanes)),
                            self.vector)  # fmt: skip

    def float8(self, codes: Any, dtype: str) -> Any:
        """int32 lanes from 0 to 255 as the float8 that they encode, in float32."""
        b = self.b
        if dtype == "F8_E5M2":
            return self.half(b.shl(codes, self.same(8)))
        if dtype == "F8_E8M0":
            return self.power_of_two(codes)
        sign = b.shl(b.and_(codes, self.same(0x80)), self.same(8))
        magnitude = b.and_(codes, self.same(0x7F))
        value = self.half(b.or_(sign, b.shl(magnitude, self.same(7))))  # exponents are 8 too small
        is_nan = b.icmp_signed("==", magnitude, self.same(0x7F))
        nan = self.constant(float("nan"))
        return b.select(is_nan, nan, b.fmul(value, self.constant(256.0)))

    def power_of_two(self, codes: Any) -> Any:
        """2 to the code - 127, as scales of MX formats are stored; 255 is NaN."""
        b = self.b
        normal = b.shl(codes, self.same(23))
        smallest = b.icmp_signed("==", codes, self.same(0))
        is_nan = b.icmp_signed("==", codes, self.same(255))
        bits = b.select(smallest, self.same(1 << 22), normal)
        return b.bitcast(b.select(is_nan, self.same(0x7FC00000), bits), self.vector)

    def table(self, values: tuple[float, ...], codes: Any) -> Any:
        """values[code] for int32 lanes from 0 to 15, in float32."""
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

    # Pairs of bfloat16; on CPUs of 16 lanes alone

    def pair(self, first: Any, second: Any) -> Any:
        """Two float32 as a pair of bfloat16, rounded to nearest."""
        narrow = self.b.bitcast(self.b.call(self._narrow, [second, first]), self.pair_type)
        order = [half * self.lanes + lane for lane in range(self.lanes) for half in (0, 1)]
        undefined = ir.Constant(narrow.type, ir.Undefined)
        return self.b.bitcast(
            self.b.shuffle_vector(narrow, undefined, self.ints(order)), self.words
        )

    def table_pair(self, values: tuple[float, ...], words: Any, first: int) -> Any:
        """values[code] as pairs of bfloat16, for the codes in both halves of the words.

        Args:
            values: 16 or 32, of which the 4 or 5 bits from `first` on choose.
        """
        # the instruction looks at five bits of each half: twice 16 values need no mask
        table = ir.Constant(self.pair_type, [bfloat_bits(v) for v in values * (32 // len(values))])
        moved = self.b.lshr(words, self.same(first)) if first else words
        return self.b.bitcast(
            self.b.call(self._table_pair, [table, self.b.bitcast(moved, self.pair_type)]),
            self.words,
        )

    def float8_pair(self, words: Any, first: int) -> Any:
        """E4M3 codes in both halves of the words, from bit `first` on, as a pair of bfloat16."""
        b, shorts = self.b, self.shorts
        moved = b.lshr(words, self.same(first)) if first else words
        codes = b.bitcast(moved, self.pair_type)
        magnitude = b.and_(codes, shorts(0x7F))
        normal = b.add(b.shl(magnitude, shorts(4)), shorts((127 - 7) << 7))
        small = [bfloat_bits(code / 512) for code in range(8)]
        table = ir.Constant(self.pair_type, small * 4)
        below = b.call(self._table_pair, [table, magnitude])
        value = b.select(b.icmp_unsigned("<", magnitude, shorts(8)), below, normal)
        is_nan = b.icmp_unsigned("==", magnitude, shorts(0x7F))
        value = b.select(is_nan, shorts(0x7FC0), value)
        sign = b.shl(b.and_(codes, shorts(0x80)), shorts(8))
        return b.bitcast(b.or_(value, sign), self.words)

    def wide_table_pair(self, values: tuple[float, ...], words: Any) -> Any:
        """values[code] as pairs of bfloat16, of 64 that codes of 6 bits in both halves choose."""
        bits = [bfloat_bits(value) for value in values]
        low, high = (ir.Constant(self.pair_type, bits[at : at + 32]) for at in (0, 32))
        codes = self.b.bitcast(words, self.pair_type)
        return self.b.bitcast(self.b.call(self._wide_table, [low, codes, high]), self.words)

    def both_bits(self, words: Any, first: int, count: int) -> Any:
        """`count` bits of each half of the words from bit `first` on."""
        moved = self.b.lshr(words, self.same(first)) if first else words
        return self.b.and_(moved, self.same((2**count - 1) * 0x10001))

    def shorts(self, value: int) -> Any:
        """An integer in every 16-bit lane."""
        return ir.Constant(self.pair_type, [value] * (2 * self.lanes))


def bfloat_bits(value: float) -> int:
    """The bits of the bfloat16 that is nearest to a normal number or zero."""
    bits = int.from_bytes(struct.pack("<f", value), "little")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
