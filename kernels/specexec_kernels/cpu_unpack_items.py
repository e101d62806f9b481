"""Calls a format to emit what a matmul kernel multiplies by: the items and terms of a unit.

In a format with an index (PackedFormat.index), a block's inputs do not share a group. The terms of
all groups are then written to memory for the outputs of a claim, and each value is multiplied by
the terms of its own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import I64
from specexec_kernels.cpu_matmul_spec import OUTPUTS, SCRATCH, MatmulSpec
from specexec_kernels.cpu_unpack_lanes import Lanes


class Items(Lanes):
    """Emits the items and terms of a strip's outputs.

    Attributes:
        first: the first output of the strip that `begin_strip` was last called with.
    """

    def __init__(self, spec: MatmulSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        self.outputs = self.argument(OUTPUTS)
        self.inputs = self.b.mul(self.units, I64(spec.format.unit))
        if spec.format.index:
            group = spec.format.index[1]
            self.groups = self.b.udiv(self.b.add(self.inputs, I64(group - 1)), I64(group))

    def first_output(self, strip: Any) -> Any:
        """The first output of a strip.

        The last strip is moved back so that it ends at the last output; in OUT each strip has
        columns of its own.
        """
        limit = self.b.sub(self.outputs, I64(self.spec.strip))
        return self.minimum(self.b.mul(strip, I64(self.spec.strip)), limit)

    def weight_items(self) -> Iterator[Any]:
        """Emits the items of the unit and outputs that `at` was last called with."""
        fmt = self.spec.format
        if self.spec.whole:
            return fmt.quads(self) if self.spec.quads else fmt.integers(self)
        if not fmt.index:
            return fmt.pairs(self) if self.spec.dot else fmt.values(self)
        values = (
            self.scaled(place, value)
            for place, value in zip(fmt.order, fmt.values(self), strict=True)
        )
        return (self.pair(first, next(values)) for first in values) if self.spec.dot else values

    def block_terms(self, number: int) -> tuple[Any, Any]:
        """The terms of a block (PackedFormat.terms); (None, None) in a format with an index, where
        values have terms instead."""
        fmt = self.spec.format
        if fmt.index:
            return None, None
        # a block of rows in 8 bits may be a part of the format's block
        return fmt.terms(self, number * self.spec.block // fmt.block)

    def prepare(self, start: Any, stop: Any) -> None:
        """Writes the terms of all groups of strips start..stop to the scratch memory, as
        [strip][group][2][output]; nothing to do in a format without an index."""
        b, spec = self.b, self.spec
        if not spec.format.index:
            return
        group, unit = spec.format.index[1], spec.format.unit
        each, step = max(unit // group, 1), max(group // unit, 1)  # groups of a unit; or reverse

        def strip_terms(strip: Any, _: list[Any]) -> list[Any]:
            self.begin_strip(strip)

            def put(first: Any, _: list[Any]) -> list[Any]:
                for v, number in product(range(spec.vectors), range(each)):
                    self.at(b.add(self.first, I64(v * self.lanes)), first)
                    at = b.add(b.mul(b.udiv(first, I64(step)), I64(each)), I64(number))
                    for i, term in enumerate(spec.format.terms(self, number)):
                        if term is not None:
                            self.store(term, self.scratch, self.scratch_place(at, i))
                return []

            return self.loop(I64(0), self.units, step, [], put)

        self.loop(start, stop, 1, [], strip_terms)

    def begin_strip(self, strip: Any) -> None:
        """Sets the strip that the other methods emit for, and where its groups' terms are."""
        self.first = self.first_output(strip)
        if self.spec.format.index:
            size = self.b.mul(self.groups, I64(4 * 2 * self.spec.strip))
            self.scratch = self.b.add(self.argument(SCRATCH), self.b.mul(strip, size))

    def scratch_place(self, group: Any, term: int) -> Any:
        """The index in the strip's scratch memory of a group's term, 0 for scales and 1 for
        offsets, for the outputs of the lanes."""
        b, width = self.b, self.spec.strip
        lane = b.add(b.sub(self.row, self.first), I64(term * width))
        return b.add(b.mul(group, I64(2 * width)), lane)

    def scaled(self, place: int, value: Any) -> Any:
        """Applies the scale and offset of its group to the value of input `place` of the unit."""
        fmt = self.spec.format
        assert fmt.index is not None
        leaf, size = fmt.index
        group = (
            self.number_at(leaf, place) if leaf else self.b.udiv(self.input_at(place), I64(size))
        )
        terms = [
            self.load(self.scratch, self.scratch_place(group, i), self.vector)
            for i in range(1 + fmt.has_offset)
        ]
        return self.fma(value, *terms) if len(terms) > 1 else self.b.fmul(value, *terms)
