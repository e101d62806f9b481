"""LLVM IR of many rows times a weight: a tile of items is unpacked once for all chunks of rows.

The tile lies in the L1 cache (Goto and van de Geijn, "Anatomy of High-Performance Matrix
Multiplication", 2008). `Many` multiplies by it in vector registers, `InTiles` in tile registers,
where cpu_panels_ir calls it a panel.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import I64
from specexec_kernels.cpu_matmul_spec import MatmulSpec
from specexec_kernels.cpu_matmul_sums import Operands, Sums
from specexec_kernels.cpu_panels_ir import MOST_TOTALS, PanelArgs, Panels, PanelShape
from specexec_kernels.cpu_tiles_ir import TILE_PAIRS
from specexec_kernels.cpu_unpack_lines import share

UNROLL = 4  # the most items per iteration of the multiplying loop


class Tile(Operands):
    """Unpacks the items and terms of a tile to memory.

    Attributes:
        tile: address of the items, [item][output].
        tile_terms: address of the blocks' scales and offsets, float32 [block][2][output].
    """

    tile: Any
    tile_terms: Any

    def fill(self, first: Any, last: Any) -> None:
        """Puts units first..last of a strip and their terms into the tile."""
        vectors = self.spec.vectors
        if self.spec.goes_down:  # the vectors' codes lie side by side, and are read together
            self.fill_vectors([I64(v) for v in range(vectors)], first, last)
            return
        self.loop(I64(0), I64(vectors), 1, [],
                  lambda v, _: self.fill_vectors([v], first, last))  # fmt: skip

    def fill_vectors(self, vectors: list[Any], first: Any, last: Any) -> list[Any]:
        """`fill` for some of the strip's vectors of outputs."""
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
                at = b.add(b.mul(local, I64(self.spec.unit_items * spec.strip)), lane)
                fetches = self.ahead()
                for j, item in enumerate(self.weight_items()):
                    for fetch in share(fetches, j, self.spec.unit_items):
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
        """The (scale, offset) of a block of the tile for each vector of outputs; None where the
        format has none."""
        b, spec, strip = self.b, self.spec, self.spec.strip
        at = b.mul(block, I64(2 * strip))

        def term(vector: int, number: int) -> Any:
            place = b.add(at, I64(number * strip + vector * self.lanes))
            return self.load(self.tile_terms, place, self.vector)

        return [
            (term(v, 0) if spec.has_scale else None, term(v, 1) if spec.has_offset else None)
            for v in range(self.spec.vectors)
        ]


class Many(Sums, Tile):
    """Multiplies every chunk of rows by a tile before the next tile is unpacked."""

    def __init__(self, spec: MatmulSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        tile = spec.tile_units * spec.unit_items * spec.strip
        terms = spec.tile_units // spec.block_units * spec.unit_blocks * 2 * spec.strip
        self.tile, self.tile_terms = self.reserve(tile), self.reserve(terms)

    def _hidden(self, number: Any, *, stays: bool = False) -> Any:
        """The number as it is: a tile of plain weights is filled faster by LLVM's own addresses."""
        return number

    def multiply_strip(self, strip: Any, begin: Any, end: Any) -> list[Any]:
        b, spec = self.b, self.spec
        self.begin_strip(strip)
        column = b.mul(strip, I64(spec.strip))

        def before(c: Any) -> list[Any]:
            places = self.places(c, column)
            return [self.load(self.out, place, self.vector) for place in places]

        def tile(first: Any, _: list[Any]) -> list[Any]:
            last = self.minimum(b.add(first, I64(spec.tile_units)), end)
            later = self._next_tile(first, last) if spec.format.fetches_early else None
            self.fill(first, last)
            first_block = b.udiv(b.mul(first, I64(spec.format.unit)), I64(spec.block))
            up = b.add(b.mul(last, I64(spec.format.unit)), I64(spec.block - 1))
            end_block = b.udiv(up, I64(spec.block))
            first_item = b.mul(first, I64(spec.unit_items))
            last_item = b.mul(last, I64(spec.unit_items))

            def chunk(c: Any, _: list[Any]) -> list[Any]:
                def block(number: Any, _: list[Any]) -> list[Any]:
                    start = b.mul(number, I64(spec.block_items))
                    stop = self.minimum(b.add(start, I64(spec.block_items)), last_item)
                    begun = self.begun(c, number, before(c) if spec.chained else [])
                    sums = self._tile_sums(c, start, stop, first_item, begun, later)
                    terms = self.stored_terms(b.sub(number, first_block))
                    totals = self.with_block(c, number, before(c), sums, terms)
                    places = self.places(c, column)
                    for total, place in zip(totals, places, strict=True):
                        self.store(total, self.out, place)
                    return []

                return self.loop(first_block, end_block, 1, [], block)

            return self.loop(I64(0), self.chunks, 1, [], chunk)

        return self.loop(begin, end, spec.tile_units, [], tile)

    def _next_tile(self, first: Any, last: Any) -> tuple[Any, Any]:
        """The first output and the first unit of the tile that comes after units first..last.

        It has the next units of the same strip, or the same units of the next strip where codes go
        down the inputs.
        """
        if self.spec.goes_down:
            return self.b.add(self.first, I64(self.spec.strip)), first
        return self.first, last

    def _tile_sums(
        self, chunk: Any, start: Any, stop: Any, first_item: Any, begun: list[Any],
        later: tuple[Any, Any] | None,
    ) -> list[Any]:  # fmt: skip
        """The sums of a chunk over items start..stop.

        Args:
            first_item: the tile's first.
            begun: the values that the sums begin with, [row][vector].
            later: the place of the tile to prefetch meanwhile, from _next_tile.
        """
        b, spec = self.b, self.spec
        unroll = next(
            n
            for n in (2 * UNROLL if spec.quads == "int16 sums" else UNROLL, 2, 1)
            if spec.unit_items % n == spec.block_items % n == 0
        )
        turns = spec.tile_units * spec.unit_items // unroll  # iterations for a chunk

        def step(item: Any, sums: list[Any]) -> list[Any]:
            local = b.sub(item, first_item)
            if later is not None:
                turn = b.add(b.mul(chunk, I64(turns)), b.udiv(local, I64(unroll)))
                self.fetch_share(*later, turn, b.mul(self.chunks, I64(turns)))
            at = b.mul(local, I64(spec.strip))
            weights = (
                [self.load(self.tile, b.add(at, I64(j * spec.strip + v * self.lanes)), self.words)
                 for v in range(spec.vectors)]
                for j in range(unroll)
            )  # fmt: skip
            return self.multiply(chunk, item, weights, sums)

        return self.loop(start, stop, unroll, begun, step)


class InTiles(Tile):
    """Multiplies in tile registers, which round in their own way (cpu_tiles_ir)."""

    def __init__(self, spec: MatmulSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        self.panels = Panels(self, self._panel_shape())
        self.tile, self.tile_terms = self.panels.weights, self.panels.terms

    def emit(self) -> None:
        """Emits the kernel: claims strips until none is left."""
        counter, first, end, at_once = self.claims()
        args = PanelArgs(
            pairs=self.items, x=self.x, x_blocks=self.b.udiv(self.items, I64(TILE_PAIRS)),
            x_sums=self.x_sums, blocks=self.blocks, chunks=self.chunks, out=self.out,
            out_stride=self.b.mul(self.strips, I64(self.spec.strip)),
        )  # fmt: skip
        self.panels.emit(
            counter, (first, end, at_once), args, self._fill, self._fetch, self.prepare
        )

    def _panel_shape(self) -> PanelShape:
        """The sizes of what the kernel keeps in the caches."""
        spec = self.spec
        few_totals = 1
        if spec.goes_down:  # as many strips of a claim in turn as their sums fit
            few_totals = MOST_TOTALS // (spec.rows * spec.strip)
        return PanelShape(
            rows=spec.rows, vectors=spec.vectors, pairs=spec.tile_units * spec.unit_items,
            block_pairs=spec.block_items, few_totals=few_totals,
            has_scale=spec.has_scale, has_offset=spec.has_offset,
        )  # fmt: skip

    def _fill(self, strip: Any, first: Any, last: Any) -> None:
        """Puts pairs first..last of a strip and their terms into the panel."""
        self.begin_strip(strip)
        first, last = (self.b.udiv(end, I64(self.spec.unit_items)) for end in (first, last))
        self.fill(first, last)

    def _fetch(self, strip: Any, pair: Any, turn: Any, turns: Any) -> None:
        """Prefetches share `turn` of `turns` of the strip's panel that begins with `pair`."""
        if self.spec.format.fetches_early:
            unit = self.b.udiv(pair, I64(self.spec.unit_items))
            self.fetch_share(self.first_output(strip), unit, turn, turns)
