"""LLVM IR that matmul kernels share: their arguments, and products summed in vector registers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I32, I64, Bfloat
from specexec_kernels.cpu_matmul_spec import (
    AT_ONCE,
    CHUNKS,
    COUNTER,
    OUT,
    STRIPS,
    X_SUMS,
    MatmulSpec,
    X,
)
from specexec_kernels.cpu_unpack_items import Items


class Operands(Items):
    """The arguments that every matmul kernel is given."""

    def __init__(self, spec: MatmulSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        self.x, self.x_sums, self.out = (self.argument(at) for at in (X, X_SUMS, OUT))
        self.chunks, self.strips = self.argument(CHUNKS), self.argument(STRIPS)
        self.items = self.b.mul(self.units, I64(spec.unit_items))
        up = self.b.add(self.inputs, I64(spec.format.block - 1))
        self.blocks = self.b.udiv(up, I64(spec.format.block))

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

    def begun(self, totals: list[Any]) -> list[Any]:
        """What the sums of a block begin with, [row][vector]: zeros, or the totals so far where
        the format is `chained`."""
        return totals if self.spec.chained else self.no_sums()

    def multiply(self, chunk: Any, item: Any, weights: list[Any], sums: list[Any]) -> list[Any]:
        """Adds the products of one item to the sums.

        Args:
            chunk: number of the chunk of rows, in memory X as [chunk][item][row].
            item: number of the item.
            weights: the item, one vector register for each vector of outputs.
            sums: [row][vector], and so returned.
        """
        b, spec = self.b, self.spec
        at = b.mul(b.add(b.mul(chunk, self.items), item), I64(spec.rows))
        sums = list(sums)
        for m in range(spec.rows):
            x = self.splat(self.load(self.x, b.add(at, I64(m)), I32), self.lanes)
            for v, weight in enumerate(weights):
                i = m * spec.vectors + v
                if spec.dot:
                    both = b.bitcast(weight, self._pairs), b.bitcast(x, self._pairs)
                    sums[i] = b.call(self._dot, [sums[i], *both])
                else:
                    both = b.bitcast(weight, self.vector), b.bitcast(x, self.vector)
                    sums[i] = self.fma(*both, sums[i])
        return sums

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
            chunk, block: their numbers, in memory X_SUMS as [chunk][block][row].
            totals, sums: [row][vector] each, and so returned.
            terms: (scale, offset) of each vector of outputs; None where the format has none.
        """
        b, spec = self.b, self.spec
        if spec.chained:  # the sums began with the totals
            return sums
        x_sums_at = b.mul(b.add(b.mul(chunk, self.blocks), block), I64(spec.rows))
        totals = list(totals)
        for m in range(spec.rows):
            x_sum = None
            if spec.has_offset:
                x_sum = self.load(self.x_sums, b.add(x_sums_at, I64(m)), F32)
                x_sum = self.splat(x_sum, self.lanes)
            for v, (scale, offset) in enumerate(terms):
                i = m * spec.vectors + v
                if scale is None:
                    totals[i] = b.fadd(totals[i], sums[i])
                else:
                    totals[i] = self.fma(scale, sums[i], totals[i])
                if offset is not None:
                    totals[i] = self.fma(offset, x_sum, totals[i])
        return totals
