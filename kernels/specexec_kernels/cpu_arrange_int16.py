"""LLVM IR that puts rows of bfloat16 into the order of the matmul kernels as pairs of int16.

Products of int16 are summed as int32. Such sums are exact, so they have the same bits in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_arrange_ir import Arrange, ArrangeSpec
from specexec_kernels.cpu_ir_emit import F32, I32, I64, build_module
from specexec_kernels.cpu_matmul_spec import TERMS_OF_WHOLE, X_BEGIN, X_STEP, X_SUM

_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000  # 1.5 * 2**23, and its bits


class WholeArrange(Arrange):
    """Emits a kernel that arranges rows of bfloat16 as pairs of int16.

    The inputs of a block are multiples of a power of two, its step, by whole numbers below 2**15:
    a number of bfloat16 has 8 bits, so one that is at least 1/128 of the block's largest is kept as
    it is, and a smaller one is rounded to nearest, to 1/32768 of the largest. A block with an
    infinity or NaN has NaN as its step.
    """

    def __init__(self, spec: ArrangeSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        self.run = spec.block  # inputs that share a step
        self.span = max(spec.unit, self.run)  # either is a multiple of the other
        self.whole = self.reserve(self.span)

    def chunk(self, number: Any, _: list[Any]) -> list[Any]:
        b, spec = self.b, self.spec
        n_items = b.udiv(self.inputs, I64(spec.per_item))
        n_blocks = b.udiv(b.add(self.inputs, I64(spec.block - 1)), I64(spec.block))

        def row(m: Any, _: list[Any]) -> list[Any]:
            at = b.add(b.mul(number, I64(spec.rows)), m)
            is_there = b.icmp_signed("<", at, self.n_rows)
            first = b.mul(b.select(is_there, at, I64(0)), self.inputs)

            def run(start: Any, _: list[Any]) -> list[Any]:
                step, totals = self.to_whole(first, start)
                for number_in_run, total in enumerate(totals):
                    i = b.add(b.udiv(start, I64(spec.block)), I64(number_in_run))
                    at = b.add(b.mul(number, n_blocks), i)
                    at = b.add(b.mul(at, I64(TERMS_OF_WHOLE * spec.rows)), m)
                    begin = b.mul(total, I32(-(spec.zero or 0)))
                    for term, value in ((X_SUM, self.x_sum(first, i, step, total)),
                                        (X_STEP, step), (X_BEGIN, begin)):  # fmt: skip
                        value = b.select(is_there, value, I32(0))
                        self.store(value, self.sums_at, b.add(at, I64(term * spec.rows)))
                return []

            def unit(start: Any, _: list[Any]) -> list[Any]:
                local = b.urem(start, I64(self.span))
                item = b.add(b.mul(number, n_items), b.udiv(start, I64(spec.per_item)))
                for i in range(spec.unit // spec.per_item):
                    word = self.whole_item(local, i)
                    place = b.add(b.mul(b.add(item, I64(i)), I64(spec.rows)), m)
                    self.store(b.select(is_there, word, I32(0)), self.items_at, place)
                return []

            def span(start: Any, _: list[Any]) -> list[Any]:
                stop = self.minimum(b.add(start, I64(self.span)), self.inputs)
                self.loop(start, stop, self.run, [], run)
                return self.loop(start, stop, spec.unit, [], unit)

            return self.loop(I64(0), self.inputs, self.span, [], span)

        return self.loop(I64(0), I64(spec.rows), 1, [], row)

    def whole_item(self, local: Any, number: int) -> Any:
        """Item `number` of the unit that begins at place `local` of `whole`."""
        b, order = self.b, self.spec.order
        low, high = (
            self.load(self.whole, b.add(local, I64(order[2 * number + half])), I32)
            for half in (0, 1)
        )
        return b.or_(b.and_(low, I32(0xFFFF)), b.shl(high, I32(16)))

    def x_sum(self, first: Any, number: Any, step: Any, total: Any) -> Any:
        """The bits of what offsets of a block are multiplied by: the sum of its inputs.

        Args:
            first: place of the row's first input in the source.
            number: of the block.
            step, total: as `to_whole` found them.
        """
        return self.b.bitcast(self.block_sum(first, number), I32)

    def to_whole(self, first: Any, start: Any) -> tuple[Any, list[Any]]:
        """Puts the integers of the run that begins with input `start` of a row into `whole`.

        Args:
            first: place of the row's first input in the source.
        Returns:
            the step's bits, and the sum of each block's integers.
        """
        b = self.b
        width = min(self.spec.lanes, self.spec.unit & -self.spec.unit, self.spec.block)
        words = ir.VectorType(I32, width)
        found = []
        for at in range(0, self.run, width):
            place = b.add(start, I64(at))
            is_there = b.icmp_signed("<", place, self.inputs)
            values = self.values(b.add(first, b.select(is_there, place, I64(0))), width)
            found.append(b.select(is_there, values, ir.Constant(values.type, [0.0] * width)))
        largest = ir.Constant(words, [0] * width)
        for values in found:
            size = b.and_(b.bitcast(values, words), ir.Constant(words, [0x7FFFFFFF] * width))
            largest = b.select(b.icmp_signed(">", size, largest), size, largest)
        size = self.across(largest, self.maximum)
        step, inverse = self.step(size)
        factor = self.splat(b.bitcast(inverse, F32), width)
        totals = [ir.Constant(words, [0] * width)] * max(self.run // self.spec.block, 1)
        for number, values in enumerate(found):
            # the lowest bits of 1.5 * 2**23 + n are n
            bits = b.fadd(b.fmul(values, factor), ir.Constant(values.type, [_ROUND] * width))
            integers = b.sub(b.bitcast(bits, words), ir.Constant(words, [_ROUND_BITS] * width))
            self.keep(integers, b.add(b.urem(start, I64(self.span)), I64(number * width)))
            block = number * width // self.spec.block
            totals[block] = b.add(totals[block], integers)
        is_number = b.icmp_signed("<", size, I32(255 << 23))
        step = b.select(is_number, step, I32(0x7FC00000))
        return step, [self.across(total, b.add) for total in totals]

    def step(self, largest: Any) -> tuple[Any, Any]:
        """The bits of the step of a run, and of its inverse.

        Args:
            largest: the bits of the run's largest absolute value.
        """
        b, exponent = self.b, self.b.lshr(largest, I32(23))
        step = b.shl(b.sub(self.maximum(exponent, I32(15)), I32(14)), I32(23))
        # scales times the smallest step are denormal, for which CPUs take a hundred cycles
        step = b.select(b.icmp_signed("==", largest, I32(0)), I32(127 << 23), step)
        return step, b.sub(I32(254 << 23), step)

    def keep(self, integers: Any, place: Any) -> None:
        """Writes integers to `whole`, from `place` on."""
        self.store(integers, self.whole, place)

    def across(self, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
        """All lanes of a vector joined to one number."""
        total, *others = (
            self.b.extract_element(vector, I32(lane)) for lane in range(vector.type.count)
        )
        for other in others:
            total = join(total, other)
        return total


def build_whole_arrange(spec: ArrangeSpec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for `spec`, which must have a `zero`."""
    return build_module(name, lambda function: WholeArrange(spec, function).emit())
