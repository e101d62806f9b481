"""The place in a weight that a kernel reads at, and how it reads tensors that go down the inputs.

Such a tensor has a line in memory for one or more inputs. In a line the words of neighbouring
outputs are neighbours, so one load gives every lane its output's word. cpu_unpack_lanes reads all
other tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import I16, I32, I64
from specexec_kernels.cpu_matmul_spec import PARTS, UNITS, MatmulSpec
from specexec_kernels.cpu_unpack_numbers import ITEM_TYPES, Numbers
from specexec_kernels.formats.base import Part

Fetch = Callable[[], None]  # emits the prefetch of a cache line, or of one in each line of a unit
AHEAD_OUTPUTS = 64  # how far ahead of the unpacking a line is prefetched, in outputs
LINE_BYTES, LINE_WORDS = 64, 16  # of a cache line


class Lines(Numbers):
    """The place in a weight, and the reading of tensors that go down the inputs.

    Attributes:
        parts: by leaf, the format's tensor, its address, and its number of columns.
        units: units of the weight's inputs.
        unit: number of the present unit, counted from the first input.
        row: the output in the first lane.
    """

    def __init__(self, spec: MatmulSpec, function: ir.Function) -> None:
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        super().__init__(builder, spec.lanes, spec.dot, spec.byte_tables)
        self.spec = spec
        self.base = self.b.ptrtoint(function.args[0], I64)
        self.parts: dict[str, tuple[Part, Any, Any]] = {}
        for number, part in enumerate(spec.format.parts):
            at = PARTS + 2 * number
            self.parts[part.leaf] = part, self.argument(at), self.argument(at + 1)
        self.units = self.argument(UNITS)
        self.unit: Any = None
        self.row: Any = None

    def at(self, row: Any, unit: Any) -> None:
        """Sets the place: a unit of the outputs from `row` on."""
        self.row, self.unit = row, unit

    def argument(self, position: int) -> Any:
        """Loads an int64 of the argument array."""
        return self.load(self.base, I64(position), I64, 8)

    def input_at(self, place: int) -> Any:
        """The number of input `place` of the unit, counted from the weight's first input."""
        return self.b.add(self.b.mul(self.unit, I64(self.spec.format.unit)), I64(place))

    def number_at(self, leaf: str, place: int) -> Any:
        """Reads the int32 of input `place` of the unit in a tensor of one number for each input, as
        int64."""
        return self.b.sext(self.load(self.parts[leaf][1], self.input_at(place), I32), I64)

    def line_word(self, leaf: str, number: int) -> Any:
        """Reads word `number` of the unit for each lane, in a tensor that goes down the inputs."""
        b, (part, base, columns) = self.b, self.parts[leaf]
        assert part.dtype == "I32", f"codes that go down are read as words, not {part.dtype}"
        lines = part.items * self.spec.format.unit // part.inputs
        line = b.add(b.mul(self.unit, I64(lines)), I64(number))
        at = b.add(b.mul(line, columns), self.row)
        return self.load(base, at, self.words)

    def line_number(self, leaf: str, place: int) -> Any:
        """Reads the weights of input `place` of the unit in a tensor of plain numbers, where each
        input has a line; float32 lanes."""
        part, base, columns = self.parts[leaf]
        typ, size = ITEM_TYPES[part.dtype]
        at = self.b.add(self.b.mul(self.input_at(place), columns), self.row)
        return self.number(self.load(base, at, ir.VectorType(typ, self.lanes), size), part.dtype)

    def codes_along(
        self, leaf: str, row: Any, bits: int, *, added: int = 0, interleaved: bool = False
    ) -> Any:
        """Reads a code for each lane from words that are packed along the outputs; int32 lanes.

        Args:
            leaf: name of a tensor (rows, outputs * bits / 32) int32.
            row: of the tensor.
            bits: bits of a code: 2, 3, 4 or 8.
            added: number that is added to each word before codes are cut out; 0 with 3 bits.
            interleaved: whether codes of 4 bits lie in AWQ's order, outputs 0 2 4 6 1 3 5 7.
        """
        b, (_, base, columns) = self.b, self.parts[leaf]
        bit = b.mul(self.row, I64(bits))
        line = b.add(base, b.mul(b.mul(row, columns), I64(4)))
        if bits == 3:
            n_bytes = -(-3 * self.lanes // 8)
            at = b.inttoptr(b.add(line, b.udiv(bit, I64(8))), ir.PointerType())
            run = b.zext(b.load(at, typ=ir.IntType(8 * n_bytes), align=1), I64)
            run = b.lshr(run, b.urem(bit, I64(8)))
            wide = ir.VectorType(I64, self.lanes)
            moved = b.lshr(self.splat(run, self.lanes),
                           ir.Constant(wide, [3 * lane for lane in range(self.lanes)]))  # fmt: skip
            return b.and_(b.trunc(moved, self.words), self.same(7))
        count = max(self.lanes * bits // 32, 1)
        words = self.load(line, b.udiv(bit, I64(32)), ir.VectorType(I32, count))
        if added:
            words = b.add(words, self.ints([added] * count))
        undefined = ir.Constant(words.type, ir.Undefined)
        each = self.ints([lane * bits // 32 for lane in range(self.lanes)])
        words = b.shuffle_vector(words, undefined, each)
        places = [lane % 8 // 2 + lane % 2 * 4 if interleaved else lane % (32 // bits)
                  for lane in range(self.lanes)]  # fmt: skip
        if self.lanes * bits < 32:  # the lanes begin in the middle of a word
            skipped = b.udiv(b.urem(bit, I64(32)), I64(1 + interleaved))
            words = b.lshr(words, self.splat(b.trunc(skipped, I32), self.lanes))
        return self.b.and_(b.lshr(words, self.ints([place * bits for place in places])),
                           self.same(2**bits - 1))  # fmt: skip

    def pairs_along(self, leaf: str, rows: tuple[Any, Any]) -> Any:
        """Reads interleaved 4-bit codes of two rows for `table_pair` with a table of 16 values.

        The first row's codes are in the lower halves of the lanes, the second row's in the upper.
        The bits above a code are undefined.

        Args:
            leaf: name of a tensor (rows, outputs / 8) int32, as for `codes_along`.
        """
        # In AWQ's order the codes of even outputs are in the lower half of a word, those of odd
        # outputs in the upper half.
        b, (_, base, columns) = self.b, self.parts[leaf]
        typ = ir.VectorType(I16, max(self.lanes // 4, 2))
        word = b.mul(b.udiv(self.row, I64(8)), I64(2))  # its first half
        first, second = (
            self.load(b.add(base, b.mul(b.mul(row, columns), I64(4))), word, typ, 2)
            for row in rows
        )  # fmt: skip
        halves = [lane // 8 * 2 + lane % 2 for lane in range(self.lanes)]
        order = [half + at for half in halves for at in (0, typ.count)]
        both = b.shuffle_vector(first, second, self.ints(order))
        if self.lanes < 8:  # the lanes may begin in the middle of a word
            skipped = b.mul(b.urem(self.row, I64(8)), I64(2))
            both = b.lshr(both, self.splat(b.trunc(skipped, I16), both.type.count))
        shifts = [lane % 8 // 2 * 4 for lane in range(self.lanes) for _ in range(2)]
        return b.bitcast(b.lshr(both, ir.Constant(both.type, shifts)), self.words)

    def lines_ahead(self, codes: Part) -> list[Fetch]:
        """The prefetches of what comes next in each of the unit's lines; see Lanes.ahead."""
        b, (_, base, columns) = self.b, self.parts[codes.leaf]
        row = self.row  # the place may be another when the prefetches are emitted
        lines = codes.items * self.spec.format.unit // codes.inputs
        first = b.mul(self.unit, I64(lines))
        outputs = codes.outputs // codes.row_items * 4 // ITEM_TYPES[codes.dtype][1]  # of a word
        ahead = max(AHEAD_OUTPUTS // outputs, LINE_WORDS)
        at = b.add(b.udiv(row, I64(outputs)), I64(ahead))

        def fetch(line: int) -> None:
            self.prefetch(base, b.add(b.mul(b.add(first, I64(line)), columns), at))

        def fetch_new() -> None:
            """Prefetches in all lines at once, when a cache line of several vectors begins."""
            is_new = b.icmp_unsigned("==", b.urem(row, I64(LINE_WORDS * outputs)), I64(0))
            with b.if_then(is_new):
                for line in range(lines):
                    fetch(line)

        return [partial(fetch, line) for line in range(lines)] if outputs == 1 else [fetch_new]


def share(whole: list[Fetch], number: int, parts: int) -> list[Fetch]:
    """Part `number` of a list that is cut into `parts` parts, as equal as possible."""
    size = len(whole)
    return whole[number * size // parts : (number + 1) * size // parts]
