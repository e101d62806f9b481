"""The methods with which formats emit LLVM IR: they read the bytes of one unit, a lane per output.

In most formats an output's inputs are neighbouring bytes. Then the words of as many outputs as a
register has lanes are loaded, and transposed before they are unpacked, since there are fewer words
than weights. cpu_unpack_lines reads tensors that go down the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I8, I16, I32, I64
from specexec_kernels.cpu_matmul_spec import MatmulSpec
from specexec_kernels.cpu_unpack_lines import LINE_BYTES, Fetch, Lines
from specexec_kernels.cpu_unpack_numbers import ITEM_TYPES
from specexec_kernels.formats.base import Part

RUN_WORDS = 4  # words of an output that are loaded at once; transposing more costs more
AHEAD_BYTES = 1024  # how far ahead of the unpacking an output's codes are prefetched
AVX2_LANES = 8
AHEAD_IN_PANEL_BYTES = 256  # the same where the panel was prefetched once already


class Lanes(Lines):
    """Reads the bytes of the unit that `at` was last called with, one lane for each output."""

    def __init__(self, spec: MatmulSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        self._read: dict[Any, Any] = {}  # see `once`
        # by leaf, the bytes from one output to the next, times 1, 3, 5 and 7; see `_of_lane`
        self._strides = {
            part.leaf: self._odd_multiples(self.b.mul(self.units, I64(self._unit_bytes(part))))
            for part in spec.format.parts
            if part.outputs == 1 and part.inputs > 0 and not part.run
        }

    def once(self, key: object, read: Callable[[], Any]) -> Any:
        """The result of `read`, which is called once for a unit: values and terms may share bytes.

        Args:
            key: tells the results of one unit apart.
            read: emits the reading.
        """
        place = id(self.unit), id(self.row), id(self.b.block), key
        if place not in self._read:
            # the objects are kept too, so that no new one can get the id of one that is gone
            self._read[place] = read(), self.unit, self.row, self.b.block
        return self._read[place][0]

    def _unit_bytes(self, part: Part) -> int:
        """Bytes of a unit of one output in a tensor."""
        return part.items * ITEM_TYPES[part.dtype][1] * self.spec.format.unit // part.inputs

    def _odd_multiples(self, stride: Any) -> dict[int, Any]:
        return {odd: self._hidden(self.b.mul(stride, I64(odd))) for odd in range(1, 8, 2)}

    def _hidden(self, number: Any, *, stays: bool = False) -> Any:
        """The same int64 behind an empty instruction, so that LLVM cannot tell how it came to be.

        In a loop over units LLVM would else add up an address for each lane, a third of all
        instructions of one row times Q4_0. So all lanes' addresses are made of a few registers.

        Args:
            stays: whether the instruction keeps its place among loads and prefetches.
        """
        return self.b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [number], side_effect=stays)

    def _first(self, leaf: str) -> Any:
        """The address of the unit in the first lane."""
        b, (part, base, _) = self.b, self.parts[leaf]
        n_bytes = I64(self._unit_bytes(part))
        return b.add(base, b.mul(b.add(b.mul(self.row, self.units), self.unit), n_bytes))

    def _places(self, leaf: str, offset: int) -> list[Any]:
        """The address of byte `offset` of the unit in each lane."""
        first = self.once((leaf, "place"), lambda: self._hidden(self._first(leaf)))
        return self._of_lanes(leaf, self.b.add(first, I64(offset)))

    def _of_lanes(self, leaf: str, first: Any) -> list[Any]:
        """The address in each lane of what is at `first` in the first one."""
        return [self._of_lane(leaf, first, lane) for lane in range(self.lanes)]

    def _of_lane(self, leaf: str, first: Any, lane: int) -> Any:
        """The address in one lane of what is at `first` in the first one.

        An odd multiple of the stride is in a register, and x86 multiplies it by 2 or 4 in an
        address. Lanes 8 to 15 count from lane 8.
        """
        assert lane < 16, f"lane {lane} is counted from lane 8, which is right up to lane 15"
        b, odd = self.b, self._strides[leaf]
        at, beyond = first, lane % 8
        if lane > beyond:
            at = b.add(first, b.shl(odd[1], I64(3)))
        if beyond:
            power = (beyond & -beyond).bit_length() - 1
            at = b.add(at, b.shl(odd[beyond >> power], I64(power)))
        return at

    def read_words(
        self, leaf: str, offset: int = 0, count: int | None = None, run: int = RUN_WORDS
    ) -> list[Any]:
        """Reads little-endian words from byte `offset` of the unit on; int32 lanes each.

        Args:
            leaf: name of the tensor.
            count: number of words; all words of the unit where not given.
            run: the most words of an output that are loaded at once, at most the lanes.
        """
        if count is None:
            count = self._unit_bytes(self.parts[leaf][0]) // 4
        return self.once((leaf, offset, count), lambda: self._words(leaf, offset, count, run))

    def _words(self, leaf: str, offset: int, count: int, run: int) -> list[Any]:
        if self.parts[leaf][0].down:
            lines = range(offset // 4, offset // 4 + count)
            return [self.line_word(leaf, line) for line in lines]
        places = self._places(leaf, offset)
        found: list[Any] = []
        while len(found) < count:
            size = min(1 << ((count - len(found)).bit_length() - 1), self.lanes, run)
            found += self._words_at(places, 4 * len(found), size)
        return found

    def read_pairs(self, leaf: str) -> list[Any]:
        """Reads a unit of twice as many floats as there are lanes, as pairs of bfloat16 rounded to
        nearest.

        They are rounded first and transposed then, since two vectors of float32 are one of pairs.
        """
        b, part = self.b, self.parts[leaf][0]
        typ, size = ITEM_TYPES[part.dtype]
        vector = ir.VectorType(typ, self.lanes)
        runs = []
        for at in self._places(leaf, 0):
            if part.dtype == "BF16":
                runs.append(self.load(at, I64(0), self.words, size))
                continue
            low, high = (
                self.number(self.load(b.add(at, I64(half * size)), I64(0), vector, size),
                            part.dtype)
                for half in (0, self.lanes)
            )  # fmt: skip
            runs.append(self.narrow(low, high))
        return self.transpose(runs)

    def _words_at(self, places: list[Any], offset: int, count: int) -> list[Any]:
        """`count` vectors with one word of each lane, from byte `offset` of the places on.

        Args:
            places: the address in each lane.
            offset: bytes.
            count: a power of two, at most the lanes.
        """
        typ = ir.VectorType(I32, count)
        runs = [self.load(at, I64(offset), typ, 1) for at in places]
        # rows i, i + count, i + 2 * count, ... side by side: count x count words to transpose each
        rows = [self._joined(runs[i::count]) for i in range(count)]
        return self.transpose(rows)

    def _joined(self, runs: list[Any]) -> Any:
        """Concatenates vectors."""
        while len(runs) > 1:
            width = 2 * runs[0].type.count
            order = self.ints(list(range(width)))
            pairs = zip(runs[::2], runs[1::2], strict=True)
            runs = [self.b.shuffle_vector(low, high, order) for low, high in pairs]
        return runs[0]

    def read_halfword(self, leaf: str, offset: int) -> Any:
        """Reads the two bytes from byte `offset` of the unit on; int32 lanes."""
        return self._narrow_items(self._places(leaf, offset), I16)

    def read_byte(self, leaf: str, offset: int) -> Any:
        """Reads the byte at `offset` of the unit; int32 lanes."""
        return self._narrow_items(self._places(leaf, offset), I8)

    def _narrow_items(self, places: list[Any], typ: Any) -> Any:
        return self.b.zext(self._gathered(places, typ), self.words)

    def _gathered(self, addresses: list[Any], typ: Any) -> Any:
        """Loads one item for each lane, each from an address of its own."""
        vector = ir.Constant(ir.VectorType(typ, self.lanes), ir.Undefined)
        for lane, at in enumerate(addresses):
            one = self.b.load(self.b.inttoptr(at, ir.PointerType()), typ=typ, align=1)
            vector = self.b.insert_element(vector, one, I32(lane))
        return vector

    def item(self, leaf: str, number: int = 0) -> Any:
        """Reads the item of a tensor that covers the unit, such as its scale, for each lane.

        Args:
            leaf: name of the tensor.
            number: which item, where several cover a unit.
        Returns:
            float32 lanes; for a tensor of integers int32 lanes, not sign-extended.
        """
        b, (part, base, columns) = self.b, self.parts[leaf]
        typ, size = ITEM_TYPES[part.dtype]
        if not part.down and part.outputs == 1 and 0 < part.inputs < self.spec.format.unit:
            bits = 8 * size
            if self._unit_bytes(part) % 4 == 0:  # whole words are fewer loads
                words, place = self.read_words(leaf), number * bits
                return self.number(self.bits(words[place // 32], place % 32, bits), part.dtype)
        column = self._column(part, number)

        def address(row: Any) -> Any:
            place = b.add(b.mul(row, columns), column)
            return b.add(base, b.mul(place, I64(size)))

        def one(at: Any) -> Any:
            return self.splat(b.load(b.inttoptr(at, ir.PointerType()), typ=typ, align=1),
                              self.lanes)  # fmt: skip

        if part.down:  # neighbours in memory belong to neighbouring outputs
            at = b.add(b.mul(column, columns), self.row)
            return self.number(
                self.load(base, at, ir.VectorType(typ, self.lanes), size), part.dtype
            )
        if part.outputs == 0:
            return self.number(one(address(I64(0))), part.dtype)
        if part.outputs == 1:
            if part.inputs == 0:
                at = b.inttoptr(address(self.row), ir.PointerType())
                return self.number(
                    b.load(at, typ=ir.VectorType(typ, self.lanes), align=1), part.dtype
                )
            rows = [b.add(self.row, I64(lane)) for lane in range(self.lanes)]
            return self.number(self._gathered([address(row) for row in rows], typ), part.dtype)
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
        return self.number(items, part.dtype)

    def _column(self, part: Part, number: int) -> Any:
        """The column of a tensor in which item `number` of the unit lies."""
        b, unit = self.b, self.spec.format.unit
        if part.inputs == 0:
            return I64(0)
        if part.inputs < unit:
            return b.add(b.mul(self.unit, I64(unit // part.inputs)), I64(number))
        return b.udiv(self.unit, I64(part.inputs // unit))

    def column(self, leaf: str, number: int = 0) -> Any:
        """The column of a tensor in which the unit's item lies (see `item`); its row, in a tensor
        that goes down the inputs."""
        return self._column(self.parts[leaf][0], number)

    def column_bits(self, leaf: str, bits: int, column: Any) -> Any:
        """Reads a code for each lane from words that are packed along the outputs; int32 lanes.

        Args:
            leaf: name of a tensor (outputs * bits / 32, columns) int32.
            bits: bits of a code: 1, 2, 4 or 8.
            column: of the tensor.
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
        """Reads the float32 of a tensor of runs (Part.run) that covers the unit's inputs from input
        `skipped` on."""
        if self.parts[leaf][0].run % self.spec.format.unit == 0:
            skipped = 0  # one item covers all of the unit's inputs
        return self.once((leaf, skipped), lambda: self._run_item(leaf, skipped))

    def _run_item(self, leaf: str, skipped: int) -> Any:
        b, (part, base, _) = self.b, self.parts[leaf]
        unit = I64(self.spec.format.unit)
        inputs = b.mul(self.units, unit)
        first = b.add(b.mul(self.unit, unit), I64(skipped))
        rows = [b.add(self.row, I64(lane)) for lane in range(self.lanes)]
        places = [b.udiv(b.add(b.mul(row, inputs), first), I64(part.run)) for row in rows]
        return self._gathered([b.add(base, b.mul(place, I64(4))) for place in places], F32)

    def lookup(self, table: str, leaf: str, number: int = 0) -> Any:
        """Reads table[byte] for the item that covers the unit in a tensor of bytes; float32 lanes.

        Each byte is made an address as a scalar, without a detour through vectors.

        Args:
            table: name of the float32 tensor.
            leaf: name of the tensor of bytes.
            number: which item, where several cover a unit.
        """
        b, (_, values, _), (part, base, columns) = self.b, self.parts[table], self.parts[leaf]
        column = self._column(part, number)
        found = []
        for lane in range(self.lanes):
            at = b.add(base, b.add(b.mul(b.add(self.row, I64(lane)), columns), column))
            code = b.zext(b.load(b.inttoptr(at, ir.PointerType()), typ=I8, align=1), I64)
            found.append(b.add(values, b.mul(code, I64(4))))
        return self._gathered(found, F32)

    def ahead(self) -> list[Fetch]:
        """The prefetches of each cache line that lies ahead of the unit; near the end of the
        inputs, of the next strip's first lines."""
        b, spec = self.b, self.spec
        codes, early = spec.format.parts[0], spec.format.fetches_early
        if early and (spec.mode == "many" or (spec.mode == "tiles" and codes.down)):
            return []
        if codes.down:
            return self.lines_ahead(codes)
        found: list[Fetch] = []
        along = {
            leaf: self._unit_bytes(part) for leaf, (part, _, _) in self.parts.items()
            if leaf in self._strides and self._unit_bytes(part)
        }  # fmt: skip
        ahead_bytes = AHEAD_IN_PANEL_BYTES if early and spec.mode == "tiles" else AHEAD_BYTES
        n_ahead = -(-ahead_bytes // max(1, *along.values()))
        is_next = b.icmp_signed(">=", b.add(self.unit, I64(n_ahead)), self.units)
        for leaf, n_bytes in along.items():
            if spec.mode == "few" and self.lanes == AVX2_LANES and n_bytes >= LINE_BYTES:
                found += self._next_strip(leaf, n_bytes)
                continue
            # a strip's outputs are read together, so what comes next is behind all of them
            skipped = b.mul(self._strides[leaf][1], I64(spec.strip - 1))
            skipped = b.select(is_next, skipped, I64(0))
            first = b.add(b.add(self._first(leaf), skipped), I64(n_ahead * n_bytes))
            found += [partial(self._fetch_lane, leaf, first, lane) for lane in range(self.lanes)]
        return found

    def _next_strip(self, leaf: str, n_bytes: int) -> list[Fetch]:
        """The prefetches of a unit's share of the strip that is read next, line after line.

        Its outputs are neighbours in memory, so that what is prefetched is one run of lines, where
        lanes' own units are as many runs as there are lanes. AVX2 reads long units faster so, and
        with fewer prefetches.

        Args:
            leaf: name of the tensor.
            n_bytes: of a unit of one output.
        """
        b, share_bytes = self.b, n_bytes * self.lanes
        strip = b.sub(self._first(leaf), b.mul(self.unit, I64(n_bytes)))
        strip = b.add(strip, b.mul(self._strides[leaf][1], I64(self.spec.strip)))
        first = b.add(strip, b.mul(self.unit, I64(share_bytes)))

        def fetch(line: int) -> None:
            # tied to its place, as in `_fetch_lane`
            at = b.add(self._hidden(first, stays=True), I64(line * LINE_BYTES))
            self.prefetch(at, I64(0))

        return [partial(fetch, line) for line in range(-(-share_bytes // LINE_BYTES))]

    def _fetch_lane(self, leaf: str, first: Any, lane: int) -> None:
        """Prefetches the lines of a unit of one lane; `first` is its address in the first lane.

        LLVM would put all prefetches of a unit side by side, where they wait for one another.
        """
        at = self._of_lane(leaf, self._hidden(first, stays=True), lane)
        for line in range(0, self._unit_bytes(self.parts[leaf][0]), LINE_BYTES):
            self.prefetch(self.b.add(at, I64(line)), I64(0))

    def fetch_share(self, output: Any, unit: Any, turn: Any, turns: Any) -> None:
        """Prefetches a share of a tile's codes: all at once they would wait for one another.

        Args:
            output, unit: the first of the tile.
            turn, turns: which share, and how many there are.
        """
        b, spec = self.b, self.spec
        codes, base, columns = self.parts[spec.format.parts[0].leaf]
        size = ITEM_TYPES[codes.dtype][1]
        if codes.down:
            lines = codes.items * spec.format.unit // codes.inputs * spec.tile_units
            first = b.mul(b.mul(unit, I64(lines // spec.tile_units)), columns)
            each_word = codes.outputs // codes.row_items
            first = b.mul(b.add(first, b.udiv(output, I64(each_word))), I64(size))
            stride, n_bytes = b.mul(columns, I64(size)), spec.strip // each_word * size
        else:
            unit_bytes = self._unit_bytes(codes)
            lines, stride = spec.strip, b.mul(self.units, I64(unit_bytes))
            first = b.add(b.mul(output, stride), b.mul(unit, I64(unit_bytes)))
            n_bytes = unit_bytes * spec.tile_units
        each = max(n_bytes // LINE_BYTES, 1)

        def fetch(number: Any, _: list[Any]) -> list[Any]:
            at = b.add(first, b.mul(b.udiv(number, I64(each)), stride))
            at = b.add(at, b.mul(b.urem(number, I64(each)), I64(LINE_BYTES)))
            self.prefetch(b.add(base, at), I64(0))
            return []

        per_turn = b.udiv(b.add(turns, I64(lines * each - 1)), turns)
        start = b.mul(turn, per_turn)
        stop = self.minimum(b.add(start, per_turn), I64(lines * each))
        self.loop(start, stop, 1, [], fetch)
