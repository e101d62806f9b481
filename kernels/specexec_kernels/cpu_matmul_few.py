"""LLVM IR of few rows times a weight: items are multiplied in registers as they are unpacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import I64
from specexec_kernels.cpu_matmul_spec import MatmulSpec
from specexec_kernels.cpu_matmul_sums import Sums
from specexec_kernels.cpu_unpack_lines import Fetch, share

_FIRST_CHUNK = I64(0)  # the only one


class Few(Sums):
    """Multiplies one chunk of rows.

    Attributes:
        rows: the first output of each vector of the strip.
    """

    def __init__(self, spec: MatmulSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        self.rows: list[Any] = []

    def multiply_strip(self, strip: Any, begin: Any, end: Any) -> list[Any]:
        b, spec = self.b, self.spec
        self.begin_strip(strip)
        self.rows = [b.add(self.first, I64(v * self.lanes)) for v in range(spec.vectors)]
        places = self.places(_FIRST_CHUNK, b.mul(strip, I64(spec.strip)))
        totals = self.no_sums()
        if spec.goes_down:  # this is called once for each tile of the strip
            is_first = b.icmp_signed("==", begin, I64(0))
            stored = [self.load(self.out, place, self.vector) for place in places]
            totals = [b.select(is_first, self.constant(0.0), total) for total in stored]
        body = self._blocks_of_unit if spec.unit_blocks > 1 else self._block
        totals = self.loop(begin, end, spec.block_units, totals,
                           lambda unit, totals: body(unit, end, totals))  # fmt: skip
        for total, place in zip(totals, places, strict=True):
            self.store(total, self.out, place)
        return []

    def _block(self, first: Any, end: Any, totals: list[Any]) -> list[Any]:
        """The totals with the products of the block that begins with unit `first` added."""
        b, spec = self.b, self.spec
        last = self.minimum(b.add(first, I64(spec.block_units)), end)
        terms = self._terms(first, 0)

        def unit(u: Any, sums: list[Any]) -> list[Any]:
            items = self._of_each(u, self.weight_items)
            return self._products(u, sums, items, 0, self._fetches(u))

        number = b.udiv(first, I64(spec.block_units))
        begun = self.begun(_FIRST_CHUNK, number, totals)
        sums = self.loop(first, last, 1, begun, unit)
        return self.with_block(_FIRST_CHUNK, number, totals, sums, terms)

    def _blocks_of_unit(self, unit: Any, end: Any, totals: list[Any]) -> list[Any]:
        """The totals with the products of a unit of several blocks added."""
        b, spec = self.b, self.spec
        fetches = self._fetches(unit)
        items = self._of_each(unit, self.weight_items)
        first = b.mul(unit, I64(spec.unit_blocks))
        for i in range(spec.unit_blocks):
            terms = self._terms(unit, i)
            number = b.add(first, I64(i))
            begun = self.begun(_FIRST_CHUNK, number, totals)
            sums = self._products(unit, begun, items, i * spec.block_items, fetches)
            totals = self.with_block(_FIRST_CHUNK, number, totals, sums, terms)
        return totals

    def _products(
        self, unit: Any, sums: list[Any], items: list[Iterator[Any]], start: int,
        fetches: list[Fetch],
    ) -> list[Any]:  # fmt: skip
        """The sums with the products of a unit's items from `start` to the end of a block added.

        Args:
            items: for each vector of outputs, an iterator that emits the item that comes next.
            fetches: the prefetches of the whole unit. They are spread between the products, since
                all at once they would wait for one another.
        """
        b, spec = self.b, self.spec
        first = b.add(b.mul(unit, I64(spec.unit_items)), I64(start))

        def weights() -> Iterator[list[Any]]:
            for j in range(start, start + min(spec.block_items, spec.unit_items)):
                for fetch in share(fetches, j, spec.unit_items):
                    fetch()
                found = []
                for row, following in zip(self.rows, items, strict=True):
                    self.at(row, unit)
                    found.append(next(following))
                yield found

        return self.multiply(_FIRST_CHUNK, first, weights(), sums)

    def _of_each(self, unit: Any, found: Callable[[], Any]) -> list[Any]:
        """Calls `found` with the place set to each vector of outputs in turn; its results."""
        each = []
        for row in self.rows:
            self.at(row, unit)
            each.append(found())
        return each

    def _terms(self, unit: Any, number: int) -> list[tuple[Any, Any]]:
        return self._of_each(unit, lambda: self.block_terms(number))

    def _fetches(self, unit: Any) -> list[Fetch]:
        return [fetch for fetches in self._of_each(unit, self.ahead) for fetch in fetches]
