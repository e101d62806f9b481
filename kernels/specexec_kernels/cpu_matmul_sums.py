"""LLVM IR that matmul kernels share: their arguments, and products summed in vector registers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I16, I32, I64, Bfloat
from specexec_kernels.cpu_matmul_spec import (
    AT_ONCE,
    CHUNKS,
    COUNTER,
    OUT,
    STRIPS,
    X_BEGIN,
    X_STEP,
    X_SUM,
    X_SUMS,
    MatmulSpec,
    X,
)
from specexec_kernels.cpu_quads_ir import Quads, most_in_int16
from specexec_kernels.cpu_unpack_items import Items


class Operands(Items):
    """The arguments that every matmul kernel is given."""

    def __init__(self, spec: MatmulSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        self.x, self.x_sums, self.out = (self.argument(at) for at in (X, X_SUMS, OUT))
        self.chunks, self.strips = self.argument(CHUNKS), self.argument(STRIPS)
        self.items = self.b.mul(self.units, I64(spec.unit_items))
        up = self.b.add(self.inputs, I64(spec.block - 1))
        self.blocks = self.b.udiv(up, I64(spec.block))

    def claims(self) -> tuple[Any, Any, Any, Any]:
        """The first arguments of Emitter.claim_strips: the counter's address, the first strip, the
        end of the strips, and the strips of one claim."""
        counter = self.ptr(self.base, I64(COUNTER), 8)
        return counter, I64(0), self.strips, self.argument(AT_ONCE)


class Sums(Operands, ABC):
    """Claims strips of outputs and multiplies rows by them in vector registers."""

    def __init__(self, spec: MatmulSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        if spec.dot:
            self._pairs = ir.VectorType(Bfloat(), 2 * self.lanes)
            dot = ir.FunctionType(self.vector, [self.vector, self._pairs, self._pairs])
            self._dot = ir.Function(function.module, dot, "llvm.x86.avx512bf16.dpbf16ps.512")
        if spec.quads:
            self._quads = Quads(self.b, self.lanes, spec.quads, spec.format.code_bits)
        elif spec.whole:
            self._int16s = ir.VectorType(I16, 2 * self.lanes)
            madd = ir.FunctionType(self.words, [self._int16s, self._int16s])
            name = "llvm.x86.avx512.pmaddw.d.512" if self.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
            self._madd = ir.Function(function.module, madd, name)

    def emit(self) -> None:
        """Emits the kernel: claims strips until none is left."""
        spec = self.spec

        def work(start: Any, stop: Any) -> None:
            def units(first: Any, last: Any) -> list[Any]:
                return self.loop(
                    start, stop, 1, [], lambda strip, _: self.multiply_strip(strip, first, last)
                )

            def tile(first: Any, _: list[Any]) -> list[Any]:
                last = self.minimum(self.b.add(first, I64(spec.tile_units)), self.units)
                return units(first, last)

            self.prepare(start, stop)
            if spec.goes_down:
                self.loop(I64(0), self.units, spec.tile_units, [], tile)
            else:
                units(I64(0), self.units)

        self.claim_strips(*self.claims(), work)

    @abstractmethod
    def multiply_strip(self, strip: Any, begin: Any, end: Any) -> list[Any]:
        """Emits the products of all rows with units begin..end of a strip."""

    def no_sums(self) -> list[Any]:
        """Zeros for the sums of one block."""
        return [self.constant(0.0)] * (self.spec.rows * self.spec.vectors)

    def begun(self, chunk: Any, block: Any, totals: list[Any]) -> list[Any]:
        """What the sums of a block begin with, [row][vector].

        These are zeros; the totals so far where the format is `chained`; and with whole numbers the
        product of each row's sum and the code that stands for zero, negative.
        """
        if self.spec.whole:
            begins = [self.x_term(chunk, block, m, X_BEGIN, I32) for m in range(self.spec.rows)]
            if self.spec.quads == "smmla":
                return self._begun_of_rows(begins)
            return [begin for begin in begins for _ in range(self.spec.vectors)]
        return totals if self.spec.chained else self.no_sums()

    def x_term(self, chunk: Any, block: Any, row: int, term: int, typ: Any) -> Any:
        """A number that a row of a chunk has for a block, in every lane; in memory X_SUMS they are
        [chunk][block][term][row]."""
        b, spec = self.b, self.spec
        at = b.mul(b.add(b.mul(chunk, self.blocks), block), I64(spec.x_terms * spec.rows))
        number = self.load(self.x_sums, b.add(at, I64(term * spec.rows + row)), typ)
        return self.splat(number, self.lanes)

    def multiply(
        self, chunk: Any, item: Any, weights: Iterable[list[Any]], sums: list[Any]
    ) -> list[Any]:
        """Adds the products of items that follow one another to the sums.

        Args:
            chunk: number of the chunk of rows, in memory X as [chunk][item][row].
            item: number of the first item.
            weights: for each item, one vector register for each vector of outputs.
            sums: [row][vector], and so returned.
        """
        if self.spec.quads == "int16 sums":
            return self._in_int16(chunk, item, weights, sums)
        if self.spec.quads == "smmla":
            return self._in_rows(chunk, item, weights, sums)
        for number, each in enumerate(weights):
            at, found = self.b.add(item, I64(number)), []
            for m in range(self.spec.rows):
                x = self._row_item(chunk, at, m)
                own = sums[m * self.spec.vectors :]
                found += [self._product(own[v], weight, x) for v, weight in enumerate(each)]
            sums = found
        return sums

    def _row_item(self, chunk: Any, item: Any, row: int) -> Any:
        """An item of a row of a chunk, in every lane."""
        b = self.b
        at = b.mul(b.add(b.mul(chunk, self.items), item), I64(self.spec.rows))
        return self.splat(self.load(self.x, b.add(at, I64(row)), I32), self.lanes)

    def _product(self, total: Any, weight: Any, x: Any) -> Any:
        """The total with the products of an item of outputs and one of a row added."""
        b, spec = self.b, self.spec
        if spec.dot:
            return b.call(self._dot, [total, *(b.bitcast(e, self._pairs) for e in (weight, x))])
        if spec.quads:
            return self._quads.multiply(total, weight, x)
        if spec.whole:
            both = [b.bitcast(each, self._int16s) for each in (weight, x)]
            return b.add(total, b.call(self._madd, both))
        return self.fma(b.bitcast(weight, self.vector), b.bitcast(x, self.vector), total)

    def _in_int16(
        self, chunk: Any, item: Any, weights: Iterable[list[Any]], sums: list[Any]
    ) -> list[Any]:
        """`multiply` with sums of as many items in int16 as they hold for certain."""
        b, many = self.b, self.spec.mode == "many"
        most = most_in_int16(self.spec.format.code_bits)
        halves: list[Any] = []
        for number, each in enumerate(weights):
            at = b.add(item, I64(number))
            xs = (self._row_item(chunk, at, m) for m in range(self.spec.rows))
            found = [self._quads.in_int16(weight, x) for x in xs for weight in each]
            if number % most:
                found = [b.add(half, more) for half, more in zip(halves, found, strict=True)]
                found = self._quads.at_once(found) if many else found
            else:
                sums = self._with_int16(sums, halves)
            halves = found
        return self._with_int16(sums, halves)

    def _begun_of_rows(self, begins: list[Any]) -> list[Any]:
        """What the sums of pairs of rows begin with, [pair][half][vector], each of two outputs by
        two rows: half of a vector's outputs, and the other half.

        Args:
            begins: for each row, its number in every lane.
        """
        found = []
        for pair in zip(begins[::2], begins[1::2], strict=True):
            for begin in self._quads.begun_of_rows(*pair):
                found += [begin] * self.spec.vectors
        return found

    def _by_rows(self, sums: list[Any]) -> list[Any]:
        """The sums of pairs of rows as [row][vector]."""
        found: list[Any] = [None] * len(sums)
        for m in range(0, self.spec.rows, 2):
            for v in range(self.spec.vectors):
                low, high = m * self.spec.vectors + v, (m + 1) * self.spec.vectors + v
                found[low], found[high] = self._quads.by_rows(sums[low], sums[high])
        return found

    def _in_rows(
        self, chunk: Any, item: Any, weights: Iterable[list[Any]], sums: list[Any]
    ) -> list[Any]:
        """`multiply` of two items by two rows at a time; sums as `_begun_of_rows` has them."""
        b, spec, each = self.b, self.spec, iter(weights)
        two = ir.VectorType(I32, 2)
        for number, first in enumerate(each):
            of_two = [self._quads.of_two(*both) for both in zip(first, next(each), strict=True)]
            at, found = b.add(b.mul(chunk, self.items), b.add(item, I64(2 * number))), []
            for m in range(0, spec.rows, 2):
                places = (b.add(b.mul(b.add(at, I64(i)), I64(spec.rows)), I64(m)) for i in (0, 1))
                x = self._quads.of_rows(*(self.load(self.x, place, two) for place in places))
                for half in (0, 1):
                    own = sums[(m + half) * spec.vectors :]
                    found += [
                        self._quads.multiply(own[v], weight[half], x)
                        for v, weight in enumerate(of_two)
                    ]
            sums = found
        return sums

    def _with_int16(self, sums: list[Any], halves: list[Any]) -> list[Any]:
        """The sums with those in int16 added, of which there may be none yet."""
        if not halves:
            return sums
        return [self._quads.with_int16(*both) for both in zip(sums, halves, strict=True)]

    def places(self, chunk: Any, column: Any) -> list[Any]:
        """Where in OUT the sums of a chunk and strip belong, [row][vector]."""
        b, spec = self.b, self.spec
        stride = b.mul(self.strips, I64(spec.strip))
        found = []
        for m in range(spec.rows):
            row = b.add(b.mul(chunk, I64(spec.rows)), I64(m))
            at = b.add(b.mul(row, stride), column)
            found += [b.add(at, I64(v * self.lanes)) for v in range(spec.vectors)]
        return found

    def with_block(
        self, chunk: Any, block: Any, totals: list[Any], sums: list[Any],
        terms: list[tuple[Any, Any]],
    ) -> list[Any]:  # fmt: skip
        """The totals with a block's sums, scaled and with their offset, added.

        Args:
            chunk, block: their numbers.
            totals, sums: [row][vector] each, and so returned.
            terms: (scale, offset) of each vector of outputs; None where the format has none.
        """
        b, spec = self.b, self.spec
        if spec.chained:  # the sums began with the totals
            return sums
        totals, sums = list(totals), self._by_rows(sums) if spec.quads == "smmla" else sums
        for m in range(spec.rows):
            step = self.x_term(chunk, block, m, X_STEP, F32) if spec.whole else None
            x_sum = self.x_term(chunk, block, m, X_SUM, F32) if spec.has_offset else None
            for v, (scale, offset) in enumerate(terms):
                i = m * spec.vectors + v
                own = sums[i]
                if step is not None:
                    own = self.to_float(own)
                    scale = step if scale is None else b.fmul(scale, step)
                if scale is None:
                    totals[i] = b.fadd(totals[i], own)
                else:
                    totals[i] = self.fma(scale, own, totals[i])
                if offset is not None:
                    totals[i] = self.fma(offset, x_sum, totals[i])
        return totals
