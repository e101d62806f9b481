"""LLVM IR that puts rows of activations into the order in which the matmul kernels read them.

Where a format has offsets, the rows are summed over each block of inputs too. It is one kernel for
two reasons: as a dozen PyTorch operations it took as long as the product of a small matrix, and
PyTorch's threads go on looking for work for a while, on the cores that the product needs. Threads
claim chunks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I16, I32, I64, Emitter, ScaleType, build_module
from specexec_kernels.cpu_tiles_ir import TILE_PAIRS

# Positions in the int64 argument array. SOURCE is the address of contiguous rows.
COUNTER, SOURCE, ROWS, INPUTS, ITEMS, SUMS, CHUNKS = range(7)
BLOCK_INPUTS = 2 * TILE_PAIRS  # inputs of a line: those of one row in a tile register


@dataclass(frozen=True, slots=True)
class ArrangeSpec:
    """What an arranging kernel is compiled for."""

    dot: bool  # whether rows are bfloat16 and items pairs of them; otherwise both are float32
    rows: int  # rows of a chunk
    block: int  # inputs of a sum, a power of two; 0 where no sums are needed
    lanes: int
    order: tuple[int, ...]  # the inputs of a unit, in the order of its items (PackedFormat.order)
    tiles: bool = False  # whether for tile registers: TILE_PAIRS items of a row lie side by side
    # the code that stands for 0, where items are whole numbers; see cpu_arrange_int16
    zero: int | None = None
    eight: ScaleType | None = None  # dtype of rows that are rounded to 8 bits; see cpu_arrange_int8
    quads: bool = False  # whether their items are four bytes, not pairs of int16

    @property
    def source(self) -> ScaleType:
        """The dtype of the rows that are given."""
        return self.eight or ("float32" if self.per_item == 1 else "bfloat16")

    @property
    def unit(self) -> int:
        """Inputs of a unit."""
        return len(self.order)

    @property
    def per_item(self) -> int:
        """Inputs of an item."""
        if self.quads:
            return 4
        return 1 if not self.dot and self.zero is None else 2


class Arrange(Emitter):
    """Emits an arranging kernel."""

    def __init__(self, spec: ArrangeSpec, function: ir.Function) -> None:
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        super().__init__(builder, spec.lanes)
        self.spec, self.base = spec, builder.ptrtoint(function.args[0], I64)
        arguments = [self.load(self.base, I64(at), I64, 8) for at in range(1, CHUNKS + 1)]
        self.source, self.n_rows, self.inputs = arguments[:3]
        self.items_at, self.sums_at, self.chunks = arguments[3:]
        self.word, self.size = (I16, 2) if spec.per_item == 2 else (I32, 4)

    def emit(self) -> None:
        """Emits the kernel: claims chunks until none is left."""

        def work(start: Any, stop: Any) -> None:
            self.loop(start, stop, 1, [], self.chunk)

        counter = self.ptr(self.base, I64(COUNTER), 8)
        self.claim_strips(counter, I64(0), self.chunks, I64(1), work)

    def chunk(self, number: Any, _: list[Any]) -> list[Any]:
        b, spec = self.b, self.spec
        n_items = b.udiv(self.inputs, I64(spec.per_item))
        up = b.add(self.inputs, I64(max(spec.block, 1) - 1))
        n_blocks = b.udiv(up, I64(max(spec.block, 1)))

        def row(m: Any, _: list[Any]) -> list[Any]:
            at = b.add(b.mul(number, I64(spec.rows)), m)
            is_there = b.icmp_signed("<", at, self.n_rows)
            # places of the last chunk beyond the rows are zeros; row 0 is read in their place
            first = b.mul(b.select(is_there, at, I64(0)), self.inputs)

            def unit(start: Any, _: list[Any]) -> list[Any]:
                for i in range(spec.unit // spec.per_item):
                    item = b.add(b.udiv(start, I64(spec.per_item)), I64(i))
                    place = b.add(b.mul(b.add(b.mul(number, n_items), item), I64(spec.rows)), m)
                    word = b.select(is_there, self.item(b.add(first, start), i), I32(0))
                    self.store(word, self.items_at, place)
                return []

            def run(start: Any, _: list[Any]) -> list[Any]:
                lines = b.udiv(self.inputs, I64(BLOCK_INPUTS))
                line = b.add(b.mul(number, lines), b.udiv(start, I64(BLOCK_INPUTS)))
                for i, values in enumerate(self.lines(b.add(first, start))):
                    place = b.add(b.mul(b.add(line, I64(i)), I64(spec.rows)), m)
                    values = b.select(
                        is_there, values, ir.Constant(values.type, [0] * BLOCK_INPUTS)
                    )
                    self.store(values, self.items_at, b.mul(place, I64(TILE_PAIRS)))
                return []

            def block(i: Any, _: list[Any]) -> list[Any]:
                place = b.add(b.mul(b.add(b.mul(number, n_blocks), i), I64(spec.rows)), m)
                total = b.select(is_there, self.block_sum(first, i), F32(0.0))
                self.store(total, self.sums_at, place)
                return []

            if spec.tiles:
                self.loop(I64(0), self.inputs, lcm(spec.unit, BLOCK_INPUTS), [], run)
            else:
                self.loop(I64(0), self.inputs, spec.unit, [], unit)
            if spec.block:
                self.loop(I64(0), n_blocks, 1, [], block)
            return []

        return self.loop(I64(0), I64(spec.rows), 1, [], row)

    def item(self, first: Any, number: int) -> Any:
        """Emits the 32-bit item `number` of the unit that begins at input `first`."""
        b, spec = self.b, self.spec
        words = []
        for i in range(number * spec.per_item, (number + 1) * spec.per_item):
            at = b.add(first, I64(spec.order[i]))
            words.append(b.zext(self.load(self.source, at, self.word, self.size), I32))
        if spec.per_item == 1:
            return words[0]
        return b.or_(words[0], b.shl(words[1], I32(16)))

    def lines(self, first: Any) -> list[Any]:
        """Emits the lines from input `first` on, each a vector of BLOCK_INPUTS bfloat16 in `order`;
        as many as the fewest units that are whole lines."""
        b, unit = self.b, self.spec.unit
        size = lcm(unit, BLOCK_INPUTS)
        order = [start + place for start in range(0, size, unit) for place in self.spec.order]
        typ = ir.VectorType(I16, BLOCK_INPUTS)
        stored = [
            self.load(self.source, b.add(first, I64(at)), typ, 2)
            for at in range(0, size, BLOCK_INPUTS)
        ]
        found = []
        for at in range(0, size, BLOCK_INPUTS):
            wanted = [divmod(place, BLOCK_INPUTS) for place in order[at : at + BLOCK_INPUTS]]
            begin, *others = sorted({vector for vector, _ in wanted})
            line = b.shuffle_vector(
                stored[begin], stored[begin], self.ints([place for _, place in wanted])
            )
            for vector in others:  # their inputs are put where the line so far has wrong ones
                choice = [BLOCK_INPUTS + place if of == vector else i
                          for i, (of, place) in enumerate(wanted)]  # fmt: skip
                line = b.shuffle_vector(line, stored[vector], self.ints(choice))
            found.append(line)
        return found

    def block_sum(self, first: Any, number: Any) -> Any:
        """The float32 sum over block `number` of the row that begins at `first`.

        The second half of the block is added to the first, and so on down to one number. Inputs
        beyond the last count as zeros.
        """
        b, spec = self.b, self.spec
        width = min(spec.lanes, spec.unit & -spec.unit, spec.block)
        start = b.mul(number, I64(spec.block))
        sums = []
        for at in range(0, spec.block, width):
            place = b.add(start, I64(at))
            is_there = b.icmp_signed("<", place, self.inputs)
            values = self.values(b.add(first, b.select(is_there, place, I64(0))), width)
            sums.append(b.select(is_there, values, ir.Constant(values.type, [0.0] * width)))
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [b.fadd(one, two) for one, two in zip(sums[:half], sums[half:], strict=True)]
        total = sums[0]
        while width > 1:
            width //= 2
            lower, upper = (
                b.shuffle_vector(total, total, self.ints(list(range(at, at + width))))
                for at in (0, width)
            )
            total = b.fadd(lower, upper)
        return b.extract_element(total, I32(0))

    def values(self, first: Any, count: int) -> Any:
        """Loads `count` inputs from `first` on as float32."""
        return self.load_scales(self.spec.source, self.source, first, count)


def build_arrange(spec: ArrangeSpec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for `spec`."""
    return build_module(name, lambda function: Arrange(spec, function).emit())
