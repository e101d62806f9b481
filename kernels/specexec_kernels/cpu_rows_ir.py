"""LLVM IR of rows times row-packed weights: the frame that all formats of formats/ share.

A strip of outputs goes through the inputs tile by tile. A tile's weights become items, one 32-bit
lane for each output of the strip: a float32, or two inputs' weights as a pair of bfloat16 where the
CPU multiplies such pairs (vdpbf16ps). Few rows multiply with the items in registers; for more they
are kept in the L1 cache, and every chunk of rows multiplies with them (the register tiling of Goto
and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).

Where the CPU multiplies tiles (AMX) the items of bfloat16 rows are kept in the L1 cache for any
number of rows, and cpu_panels_ir multiplies and sums, with a rounding of its own.

A format unpacks with what cpu_rows_lanes offers it.

Sums begin anew with every block of inputs, in the order of a format's `order`, and are then
multiplied by the block's scale and added to OUT in float32. That order is the same for any rows and
any number of threads: a row's bits are its own.

Knows nothing of torch or thread pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I32, I64, Bfloat, build_module
from specexec_kernels.cpu_panels_ir import PanelArgs, Panels, PanelShape
from specexec_kernels.cpu_rows_lanes import (
    AT_ONCE,
    CHUNKS,
    COUNTER,
    OUT,
    OUTPUTS,
    STRIPS,
    X_SUMS,
    Fetch,
    Lanes,
    RowSpec,
    X,
)
from specexec_kernels.cpu_tiles_ir import TILE_PAIRS

UNROLL = 4  # items per turn of the multiplying loop


class RowProducts(Lanes):
    """Emits one kernel."""

    def __init__(self, spec: RowSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        self.x, self.x_sums, self.out = (self.argument(at) for at in (X, X_SUMS, OUT))
        self.chunks, self.outputs = self.argument(CHUNKS), self.argument(OUTPUTS)
        self.strips = self.argument(STRIPS)
        self.block_items = spec.format.block // spec.per_item
        self.unit_items = spec.format.unit // spec.per_item
        self.items = self.b.mul(self.units, I64(self.unit_items))
        inputs = self.b.mul(self.units, I64(spec.format.unit))
        up = self.b.add(inputs, I64(spec.format.block - 1))
        self.blocks = self.b.udiv(up, I64(spec.format.block))
        if spec.tiles:
            self.panels = Panels(self, self.panel_shape())
            return
        if spec.dot:
            pairs = ir.VectorType(Bfloat(), 2 * self.lanes)
            dot = ir.FunctionType(self.vector, [self.vector, pairs, pairs])
            self._pairs = pairs
            self._dot = ir.Function(function.module, dot, "llvm.x86.avx512bf16.dpbf16ps.512")
        if not spec.few:
            tile = spec.tile_units * self.unit_items * spec.strip
            terms = spec.tile_units // spec.block_units * spec.unit_blocks * 2 * spec.strip
            self.tile, self.tile_terms = self.reserve(tile), self.reserve(terms)

    def emit(self) -> None:
        """Claim strips until none is left."""
        b, spec = self.b, self.spec
        counter = self.ptr(self.base, I64(COUNTER), 8)
        claims = I64(0), self.strips, self.argument(AT_ONCE)
        if spec.tiles:
            self.panels.emit(counter, claims, self.panel_args(), self.fill_panel)
            return

        def one(strip: Any, _: list[Any]) -> list[Any]:
            column = b.mul(strip, I64(spec.strip))
            (self.few if spec.few else self.many)(self.first_output(strip), column)
            return []

        def work(start: Any, stop: Any) -> None:
            self.loop(start, stop, 1, [], one)

        self.claim_strips(counter, *claims, work)

    def first_output(self, strip: Any) -> Any:
        """The output where a strip begins: the last one is moved back to end at the edge. In OUT it
        has columns of its own."""
        limit = self.b.sub(self.outputs, I64(self.spec.strip))
        return self.minimum(self.b.mul(strip, I64(self.spec.strip)), limit)

    def panel_shape(self) -> PanelShape:
        """What is kept in the caches where products are made in tiles."""
        spec, fmt = self.spec, self.spec.format
        return PanelShape(
            rows=spec.rows, vectors=spec.vectors, pairs=spec.tile_units * self.unit_items,
            block_pairs=self.block_items, few_totals=1, has_scale=fmt.has_scale,
            has_offset=fmt.has_offset,
        )  # fmt: skip

    def panel_args(self) -> PanelArgs:
        """The arguments as panels take them."""
        return PanelArgs(
            pairs=self.items, x=self.x, x_blocks=self.b.udiv(self.items, I64(TILE_PAIRS)),
            x_sums=self.x_sums, blocks=self.blocks, chunks=self.chunks, out=self.out,
            out_stride=self.b.mul(self.strips, I64(self.spec.strip)),
        )  # fmt: skip

    def fill_panel(self, strip: Any, first: Any, last: Any) -> None:
        """Put pairs first..last of a strip into the panel, and their terms."""
        b, output = self.b, self.first_output(strip)
        self.tile, self.tile_terms = self.panels.weights, self.panels.terms
        first, last = (b.udiv(end, I64(self.unit_items)) for end in (first, last))
        self.loop(I64(0), I64(self.spec.vectors), 1, [],
                  lambda v, _: self.fill(output, v, first, last))  # fmt: skip

    def weight_items(self) -> Iterator[Any]:
        """The items of the unit that `unit` and `row` name."""
        return self.spec.format.pairs(self) if self.spec.dot else self.spec.format.values(self)

    def few(self, output: Any, column: Any) -> None:
        """Multiply straight from the registers, where sums stay to the end of the inputs; strips
        are one vector wide."""
        b, spec = self.b, self.spec

        def multiply(
            unit: Any, sums: list[Any], items: Iterator[Any], start: int, fetches: list[Fetch]
        ) -> list[Any]:
            first = b.mul(unit, I64(self.unit_items))
            count = min(self.block_items, self.unit_items)
            for j, item in enumerate(islice(items, count), start):
                # between products, since all at once they would wait for one another
                for fetch in share(fetches, j, self.unit_items):
                    fetch()
                sums = self.multiply(I64(0), b.add(first, I64(j)), [item], sums)
            return sums

        def block(first: Any, totals: list[Any]) -> list[Any]:
            last = self.minimum(b.add(first, I64(spec.block_units)), self.units)
            self.at(output, first)
            terms = [spec.format.terms(self, 0)]

            def unit(u: Any, sums: list[Any]) -> list[Any]:
                self.at(output, u)
                return multiply(u, sums, self.weight_items(), 0, self.ahead())

            sums = self.loop(first, last, 1, self.no_sums(), unit)
            number = b.udiv(first, I64(spec.block_units))
            return self.with_block(I64(0), number, totals, sums, terms)

        def blocks_of_unit(u: Any, totals: list[Any]) -> list[Any]:
            self.at(output, u)
            fetches = self.ahead()
            items = self.weight_items()
            first = b.mul(u, I64(spec.unit_blocks))
            for i in range(spec.unit_blocks):
                terms = [spec.format.terms(self, i)]
                sums = multiply(u, self.no_sums(), items, i * self.block_items, fetches)
                totals = self.with_block(I64(0), b.add(first, I64(i)), totals, sums, terms)
            return totals

        body = blocks_of_unit if spec.unit_blocks > 1 else block
        totals = self.loop(I64(0), self.units, spec.block_units, self.no_sums(), body)
        for total, place in zip(totals, self.places(I64(0), column), strict=True):
            self.store(total, self.out, place)

    def many(self, output: Any, column: Any) -> None:
        """Unpack a tile, then multiply it with every chunk of rows."""
        b, spec = self.b, self.spec

        def tile(first: Any, _: list[Any]) -> list[Any]:
            last = self.minimum(b.add(first, I64(spec.tile_units)), self.units)
            self.loop(I64(0), I64(spec.vectors), 1, [],
                      lambda v, _: self.fill(output, v, first, last))  # fmt: skip
            first_block = b.udiv(b.mul(first, I64(spec.format.unit)), I64(spec.format.block))
            up = b.add(b.mul(last, I64(spec.format.unit)), I64(spec.format.block - 1))
            end_block = b.udiv(up, I64(spec.format.block))
            first_item = b.mul(first, I64(self.unit_items))
            last_item = b.mul(last, I64(self.unit_items))

            def chunk(c: Any, _: list[Any]) -> list[Any]:
                def block(number: Any, _: list[Any]) -> list[Any]:
                    start = b.mul(number, I64(self.block_items))
                    stop = self.minimum(b.add(start, I64(self.block_items)), last_item)
                    sums = self.tile_sums(c, start, stop, first_item)
                    terms = self.stored_terms(b.sub(number, first_block))
                    places = self.places(c, column)
                    totals = [self.load(self.out, place, self.vector) for place in places]
                    totals = self.with_block(c, number, totals, sums, terms)
                    for total, place in zip(totals, places, strict=True):
                        self.store(total, self.out, place)
                    return []

                return self.loop(first_block, end_block, 1, [], block)

            return self.loop(I64(0), self.chunks, 1, [], chunk)

        self.loop(I64(0), self.units, spec.tile_units, [], tile)

    def tile_sums(self, chunk: Any, start: Any, stop: Any, first_item: Any) -> list[Any]:
        """Sums of a chunk over items of the tile."""
        b, spec = self.b, self.spec
        unroll = next(n for n in (UNROLL, 2, 1) if self.unit_items % n == self.block_items % n == 0)

        def step(item: Any, sums: list[Any]) -> list[Any]:
            at = b.mul(b.sub(item, first_item), I64(spec.strip))
            for j in range(unroll):
                places = [b.add(at, I64(j * spec.strip + v * self.lanes))
                          for v in range(spec.vectors)]  # fmt: skip
                weights = [self.load(self.tile, place, self.words) for place in places]
                sums = self.multiply(chunk, b.add(item, I64(j)), weights, sums)
            return sums

        return self.loop(start, stop, unroll, self.no_sums(), step)

    def fill(self, output: Any, vector: Any, first: Any, last: Any) -> list[Any]:
        """Put one vector of outputs of units first..last and their terms into the tile."""
        b, spec = self.b, self.spec
        lane = b.mul(vector, I64(self.lanes))
        row = b.add(output, lane)

        def put_terms(block: Any, number: int) -> None:
            at = b.add(b.mul(block, I64(2 * spec.strip)), lane)
            for i, term in enumerate(spec.format.terms(self, number)):
                if term is not None:
                    self.store(term, self.tile_terms, b.add(at, I64(i * spec.strip)))

        def unit(u: Any, _: list[Any]) -> list[Any]:
            self.at(row, u)
            local = b.sub(u, first)
            if spec.unit_blocks > 1:
                for i in range(spec.unit_blocks):
                    put_terms(b.add(b.mul(local, I64(spec.unit_blocks)), I64(i)), i)
            at = b.add(b.mul(local, I64(self.unit_items * spec.strip)), lane)
            fetches = self.ahead()
            for j, item in enumerate(self.weight_items()):
                for fetch in share(fetches, j, self.unit_items):
                    fetch()
                self.store(item, self.tile, b.add(at, I64(j * spec.strip)))
            return []

        def block(start: Any, _: list[Any]) -> list[Any]:
            self.at(row, start)
            put_terms(b.udiv(b.sub(start, first), I64(spec.block_units)), 0)
            stop = self.minimum(b.add(start, I64(spec.block_units)), last)
            return self.loop(start, stop, 1, [], unit)

        if spec.unit_blocks > 1:
            return self.loop(first, last, 1, [], unit)
        return self.loop(first, last, spec.block_units, [], block)

    def stored_terms(self, block: Any) -> list[tuple[Any, Any]]:
        """Terms of a block of the tile, by vector; None where the format has none."""
        b, fmt, strip = self.b, self.spec.format, self.spec.strip
        at = b.mul(block, I64(2 * strip))

        def term(vector: int, number: int) -> Any:
            place = b.add(at, I64(number * strip + vector * self.lanes))
            return self.load(self.tile_terms, place, self.vector)

        return [
            (term(v, 0) if fmt.has_scale else None, term(v, 1) if fmt.has_offset else None)
            for v in range(self.spec.vectors)
        ]

    def no_sums(self) -> list[Any]:
        """Zeros for the sums of one block."""
        return [self.constant(0.0)] * (self.spec.rows * self.spec.vectors)

    def multiply(self, chunk: Any, item: Any, weights: list[Any], sums: list[Any]) -> list[Any]:
        """Add one item's products to the sums, ordered [row][vector]; X is [chunk][item][row]."""
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
        """Totals and a block's sums, [row][vector] each; X_SUMS is [chunk][block][row]."""
        b, spec = self.b, self.spec
        x_sums_at = b.mul(b.add(b.mul(chunk, self.blocks), block), I64(spec.rows))
        totals = list(totals)
        for m in range(spec.rows):
            x_sum = None
            if spec.format.has_offset:
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


def share(whole: list[Fetch], number: int, parts: int) -> list[Fetch]:
    """Part `number` of a list in as many parts, as equal as they can be."""
    size = len(whole)
    return whole[number * size // parts : (number + 1) * size // parts]


def build_rows(spec: RowSpec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for `spec`."""
    return build_module(name, lambda function: RowProducts(spec, function).emit())
