"""LLVM IR of rows times packed weights: the frame that all formats of formats/ share.

A strip of outputs goes through the inputs tile by tile. A tile's weights become items, one 32-bit
lane for each output of the strip: a float32, or two inputs' weights as a pair of bfloat16 where the
CPU multiplies such pairs (vdpbf16ps). Few rows multiply with the items in registers; for more they
are kept in the L1 cache, and every chunk of rows multiplies with them (the register tiling of Goto
and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).

Where the CPU multiplies tiles (AMX) the items of bfloat16 rows are kept in the L1 cache for any
number of rows, and cpu_panels_ir multiplies and sums, with a rounding of its own.

A format unpacks with what cpu_rows_lanes offers it; cpu_rows_items calls it.

Sums begin anew with every block of inputs, in the order of a format's `order`, and are then
multiplied by the block's scale and added to OUT in float32. That order is the same for any rows and
any number of threads: a row's bits are its own.

Knows nothing of torch or thread pools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I32, I64, Bfloat, build_module
from specexec_kernels.cpu_panels_ir import MOST_TOTALS, PanelArgs, Panels, PanelShape
from specexec_kernels.cpu_rows_items import Items
from specexec_kernels.cpu_rows_lines import Fetch
from specexec_kernels.cpu_rows_spec import (
    AT_ONCE,
    CHUNKS,
    COUNTER,
    OUT,
    STRIPS,
    X_SUMS,
    PackedSpec,
    X,
)
from specexec_kernels.cpu_tiles_ir import TILE_PAIRS

UNROLL = 4  # items per turn of the multiplying loop


class PackedProducts(Items):
    """Emits one kernel."""

    def __init__(self, spec: PackedSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        self.x, self.x_sums, self.out = (self.argument(at) for at in (X, X_SUMS, OUT))
        self.chunks, self.strips = self.argument(CHUNKS), self.argument(STRIPS)
        self.block_items = spec.format.block // spec.per_item
        self.unit_items = spec.format.unit // spec.per_item
        self.items = self.b.mul(self.units, I64(self.unit_items))
        up = self.b.add(self.inputs, I64(spec.format.block - 1))
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
            self.panels.emit(
                counter, claims, self.panel_args(), self.fill_panel, prepare=self.prepare
            )
            return

        def work(start: Any, stop: Any) -> None:
            each = self.few if spec.few else self.many
            self.prepare(start, stop)
            if not spec.goes_down:
                self.loop(start, stop, 1, [], lambda strip, _: each(strip, I64(0), self.units))
                return

            def tile(first: Any, _: list[Any]) -> list[Any]:
                last = self.minimum(b.add(first, I64(spec.tile_units)), self.units)
                return self.loop(start, stop, 1, [], lambda strip, _: each(strip, first, last))

            self.loop(I64(0), self.units, spec.tile_units, [], tile)

        self.claim_strips(counter, *claims, work)

    def panel_shape(self) -> PanelShape:
        """What is kept in the caches where products are made in tiles."""
        spec = self.spec
        return PanelShape(
            rows=spec.rows, vectors=spec.vectors, pairs=spec.tile_units * self.unit_items,
            block_pairs=self.block_items, few_totals=self._few_totals(),
            has_scale=spec.has_scale, has_offset=spec.has_offset,
        )  # fmt: skip

    def _few_totals(self) -> int:
        """As PanelShape has it: with codes that go down the inputs, all strips of a claim in turn,
        as far as their sums fit."""
        if not self.spec.goes_down:
            return 1
        return MOST_TOTALS // (self.spec.rows * self.spec.strip)

    def panel_args(self) -> PanelArgs:
        """The arguments as panels take them."""
        return PanelArgs(
            pairs=self.items, x=self.x, x_blocks=self.b.udiv(self.items, I64(TILE_PAIRS)),
            x_sums=self.x_sums, blocks=self.blocks, chunks=self.chunks, out=self.out,
            out_stride=self.b.mul(self.strips, I64(self.spec.strip)),
        )  # fmt: skip

    def fill_panel(self, strip: Any, first: Any, last: Any) -> None:
        """Put pairs first..last of a strip into the panel, and their terms."""
        b = self.b
        self.begin_strip(strip)
        self.tile, self.tile_terms = self.panels.weights, self.panels.terms
        first, last = (b.udiv(end, I64(self.unit_items)) for end in (first, last))
        self.fill(first, last)

    def few(self, strip: Any, begin: Any, end: Any) -> list[Any]:
        """Units begin..end of a strip, multiplied straight from the registers, where sums stay."""
        b, spec = self.b, self.spec
        self.begin_strip(strip)
        rows = [b.add(self.first, I64(v * self.lanes)) for v in range(spec.vectors)]

        def of_each(unit: Any, found: Callable[[], Any]) -> list[Any]:
            """What `found` gives for each vector of outputs."""
            each = []
            for row in rows:
                self.at(row, unit)
                each.append(found())
            return each

        def multiply(
            unit: Any, sums: list[Any], items: list[Iterator[Any]], start: int,
            fetches: list[Fetch],
        ) -> list[Any]:  # fmt: skip
            first = b.mul(unit, I64(self.unit_items))
            for j in range(start, start + min(self.block_items, self.unit_items)):
                # between products, since all at once they would wait for one another
                for fetch in share(fetches, j, self.unit_items):
                    fetch()
                weights = []
                for row, following in zip(rows, items, strict=True):
                    self.at(row, unit)
                    weights.append(next(following))
                sums = self.multiply(I64(0), b.add(first, I64(j)), weights, sums)
            return sums

        def terms_at(unit: Any, number: int) -> list[tuple[Any, Any]]:
            return of_each(unit, lambda: self.block_terms(number))

        def fetches_at(unit: Any) -> list[Fetch]:
            return [fetch for fetches in of_each(unit, self.ahead) for fetch in fetches]

        def block(first: Any, totals: list[Any]) -> list[Any]:
            last = self.minimum(b.add(first, I64(spec.block_units)), end)
            terms = terms_at(first, 0)

            def unit(u: Any, sums: list[Any]) -> list[Any]:
                return multiply(u, sums, of_each(u, self.weight_items), 0, fetches_at(u))

            sums = self.loop(first, last, 1, self.no_sums(), unit)
            number = b.udiv(first, I64(spec.block_units))
            return self.with_block(I64(0), number, totals, sums, terms)

        def blocks_of_unit(u: Any, totals: list[Any]) -> list[Any]:
            fetches = fetches_at(u)
            items = of_each(u, self.weight_items)
            first = b.mul(u, I64(spec.unit_blocks))
            for i in range(spec.unit_blocks):
                terms = terms_at(u, i)
                sums = multiply(u, self.no_sums(), items, i * self.block_items, fetches)
                totals = self.with_block(I64(0), b.add(first, I64(i)), totals, sums, terms)
            return totals

        places = self.places(I64(0), b.mul(strip, I64(spec.strip)))
        totals = self.no_sums()
        if spec.goes_down:  # a strip's units come in several calls
            is_first = b.icmp_signed("==", begin, I64(0))
            stored = [self.load(self.out, place, self.vector) for place in places]
            totals = [b.select(is_first, self.constant(0.0), total) for total in stored]
        body = blocks_of_unit if spec.unit_blocks > 1 else block
        totals = self.loop(begin, end, spec.block_units, totals, body)
        for total, place in zip(totals, places, strict=True):
            self.store(total, self.out, place)
        return []

    def many(self, strip: Any, begin: Any, end: Any) -> list[Any]:
        """Units begin..end of a strip: unpack a tile, then multiply it with every chunk of rows."""
        b, spec = self.b, self.spec
        self.begin_strip(strip)
        column = b.mul(strip, I64(spec.strip))

        def tile(first: Any, _: list[Any]) -> list[Any]:
            last = self.minimum(b.add(first, I64(spec.tile_units)), end)
            self.fill(first, last)
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

        return self.loop(begin, end, spec.tile_units, [], tile)

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

    def fill(self, first: Any, last: Any) -> None:
        """Put units first..last of a strip and their terms into the tile."""
        vectors = self.spec.vectors
        if self.spec.goes_down:  # side by side in memory
            self.fill_vectors([I64(v) for v in range(vectors)], first, last)
            return
        self.loop(I64(0), I64(vectors), 1, [],
                  lambda v, _: self.fill_vectors([v], first, last))  # fmt: skip

    def fill_vectors(self, vectors: list[Any], first: Any, last: Any) -> list[Any]:
        """As `fill`, for some vectors of outputs."""
        b, spec = self.b, self.spec
        lanes = [b.mul(vector, I64(self.lanes)) for vector in vectors]
        rows = [b.add(self.first, lane) for lane in lanes]

        def put_terms(unit: Any, block: Any, number: int) -> None:
            for row, lane in zip(rows, lanes, strict=True):
                self.at(row, unit)
                at = b.add(b.mul(block, I64(2 * spec.strip)), lane)
                for i, term in enumerate(self.block_terms(number)):
                    if term is not None:
                        self.store(term, self.tile_terms, b.add(at, I64(i * spec.strip)))

        def unit(u: Any, _: list[Any]) -> list[Any]:
            local = b.sub(u, first)
            if spec.unit_blocks > 1:
                for i in range(spec.unit_blocks):
                    block = b.add(b.mul(local, I64(spec.unit_blocks)), I64(i))
                    put_terms(u, block, i)
            for row, lane in zip(rows, lanes, strict=True):
                self.at(row, u)
                at = b.add(b.mul(local, I64(self.unit_items * spec.strip)), lane)
                fetches = self.ahead()
                for j, item in enumerate(self.weight_items()):
                    for fetch in share(fetches, j, self.unit_items):
                        fetch()
                    self.store(item, self.tile, b.add(at, I64(j * spec.strip)))
            return []

        def block(start: Any, _: list[Any]) -> list[Any]:
            put_terms(start, b.udiv(b.sub(start, first), I64(spec.block_units)), 0)
            stop = self.minimum(b.add(start, I64(spec.block_units)), last)
            return self.loop(start, stop, 1, [], unit)

        if spec.unit_blocks > 1:
            return self.loop(first, last, 1, [], unit)
        return self.loop(first, last, spec.block_units, [], block)

    def stored_terms(self, block: Any) -> list[tuple[Any, Any]]:
        """Terms of a block of the tile, by vector; None where the format has none."""
        b, spec, strip = self.b, self.spec, self.spec.strip
        at = b.mul(block, I64(2 * strip))

        def term(vector: int, number: int) -> Any:
            place = b.add(at, I64(number * strip + vector * self.lanes))
            return self.load(self.tile_terms, place, self.vector)

        return [
            (term(v, 0) if spec.has_scale else None, term(v, 1) if spec.has_offset else None)
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


def share(whole: list[Fetch], number: int, parts: int) -> list[Fetch]:
    """Part `number` of a list in as many parts, as equal as they can be."""
    size = len(whole)
    return whole[number * size // parts : (number + 1) * size // parts]


def build_rows(spec: PackedSpec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for `spec`."""
    return build_module(name, lambda function: PackedProducts(spec, function).emit())
