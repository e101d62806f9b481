"""LLVM IR of products in tile registers: how weights and rows go through the caches.

A panel is some inputs of a strip of outputs. The caller unpacks it to the L1 cache as pairs of
bfloat16, and every chunk of rows is multiplied by it. The chunks' sums are kept in the L2 cache
until all inputs are done. A row's bits do not depend on the other rows; cpu_tiles_ir says how its
sums are rounded.

Knows nothing of torch, of formats, or of thread pools.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I64, Emitter
from specexec_kernels.cpu_tiles_ir import ROW_BYTES, TILE_PAIRS, TILE_ROWS, Tiles

GROUP_ROWS = 512  # rows of X with sums in the L2 cache at a time
# Up to this many chunks a product waits for memory more than for arithmetic, and strips are taken
# in the order in which their weights are read fastest.
FEW_CHUNKS = 6
# With more chunks, this many strips are taken in turn, to share the rows of X in the L2 cache.
MANY_STRIPS = 8
MOST_TOTALS = 1 << 17  # the most float32 totals on a thread's stack: 512 KiB
_REGISTER_TOTALS = 16  # the most vectors of totals that stay in registers through a panel

# fill(strip, first, last) puts pairs first..last of a strip into the panel.
Fill = Callable[[Any, Any, Any], None]
# add(number, total, with_offset) gives the total of a vector with a block's sum added.
Add = Callable[[int, Any, bool], Any]
# block_sums(pair) emits the sums of the block that begins with `pair`. It gives the emitter that
# adds them to totals, and whether all of the block's offsets are zero.
BlockSums = Callable[[Any], tuple[Add, Any]]
# fetch(strip, pair, turn, turns) prefetches share `turn` of `turns` of the panel of a strip that
# begins with `pair`.
Fetch = Callable[[Any, Any, Any, Any], None]


@dataclass(frozen=True, slots=True)
class PanelShape:
    """The sizes of what a kernel keeps in the caches."""

    rows: int  # rows of a chunk
    vectors: int  # vectors of outputs in a strip
    pairs: int  # pairs of inputs in a panel
    block_pairs: int  # pairs of a block; divides `pairs`
    few_totals: int  # with few chunks: the most of strips taken in turn times chunks; see n_totals
    has_scale: bool
    has_offset: bool

    @property
    def strip(self) -> int:
        """Outputs of a strip."""
        return self.vectors * TILE_ROWS

    @property
    def has_terms(self) -> bool:
        """Whether blocks have a scale or an offset."""
        return self.has_scale or self.has_offset

    @property
    def n_totals(self) -> int:
        """How many totals of a chunk and strip are kept at a time: the most of strips taken in turn
        times chunks. Each has `rows` x `strip` numbers."""
        return max(self.few_totals, MANY_STRIPS * self.group_chunks)

    @property
    def group_chunks(self) -> int:
        """Chunks with sums in the L2 cache at a time."""
        return max(GROUP_ROWS // self.rows, 1)


@dataclass(frozen=True, slots=True)
class PanelArgs:
    """The sizes and addresses of one call."""

    pairs: Any  # pairs of inputs
    x: Any  # address of (chunks, x_blocks, rows, TILE_PAIRS) pairs
    x_blocks: Any
    x_sums: Any  # address of float32 (chunks, blocks, rows), where the format has offsets
    blocks: Any
    chunks: Any
    out: Any  # address of float32 (chunks * rows, out_stride)
    out_stride: Any


class Panels:
    """Emits products strip by strip and panel by panel.

    Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.

    Attributes:
        weights: address of the panel, [pair][output] pairs of bfloat16.
        terms: address of the blocks' scales and offsets, float32 [block][2][output].
    """

    def __init__(self, emitter: Emitter, shape: PanelShape) -> None:
        self.e, self.b, self.shape = emitter, emitter.b, shape
        block_pairs = min(shape.block_pairs, TILE_PAIRS)
        self.tiles = Tiles(self.b, shape.rows, shape.vectors, block_pairs)
        self.weights = emitter.reserve(shape.pairs * shape.strip)
        self.terms = emitter.reserve(shape.pairs // shape.block_pairs * 2 * shape.strip)
        self.block_sums = emitter.reserve(shape.rows * shape.strip)
        self.totals = emitter.reserve(shape.n_totals * shape.rows * shape.strip)

    def emit(
        self, counter: Any, claims: tuple[Any, Any, Any], args: PanelArgs, fill: Fill,
        fetch: Fetch = lambda *_: None, prepare: Callable[[Any, Any], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        """Emits the whole kernel.

        Args:
            counter, claims: the first arguments of Emitter.claim_strips.
            args: sizes and addresses of the call.
            fill: emits the code that unpacks weights and their terms to the panel.
            fetch: emits the prefetches of the weights that come next.
            prepare: emits what is done once for strips start..stop before they are multiplied.
        """
        b, loop, shape = self.b, self.e.loop, self.shape
        is_few = b.icmp_signed("<=", args.chunks, I64(FEW_CHUNKS))
        few = self.e.maximum(
            b.udiv(I64(shape.few_totals), self.e.maximum(args.chunks, I64(1))), I64(1)
        )
        strips_in_turn = b.select(is_few, few, I64(MANY_STRIPS))

        def claimed(start: Any, stop: Any) -> None:
            def strips(first: Any, _: list[Any]) -> list[Any]:
                last = self.e.minimum(b.add(first, strips_in_turn), stop)
                return loop(
                    I64(0), args.chunks, shape.group_chunks, [],
                    lambda chunk, _: self._group(args, fill, fetch, (first, last), chunk),
                )  # fmt: skip

            prepare(start, stop)
            loop(start, stop, strips_in_turn, [], strips)

        self.tiles.begin()
        self.e.claim_strips(counter, *claims, claimed, self.tiles.end)

    def _group(
        self, args: PanelArgs, fill: Fill, fetch: Fetch, strips: tuple[Any, Any], first_chunk: Any
    ) -> list[Any]:
        """Multiplies a group of chunks by some strips: panel by panel, in each panel strip by
        strip."""
        b, loop, shape = self.b, self.e.loop, self.shape
        last_chunk = self.e.minimum(b.add(first_chunk, I64(shape.group_chunks)), args.chunks)
        n_chunks = b.sub(last_chunk, first_chunk)
        is_last_group = b.icmp_signed("==", last_chunk, args.chunks)
        steps = I64(shape.pairs // self.tiles.pairs)
        turns = b.mul(n_chunks, steps)

        def each_chunk(strip: Any, work: Callable[[Any, Any], None]) -> list[Any]:
            """Emits a loop that calls `work` with each chunk and the address of its totals."""
            before = b.mul(b.sub(strip, strips[0]), n_chunks)

            def one(chunk: Any, _: list[Any]) -> list[Any]:
                number = b.add(before, b.sub(chunk, first_chunk))
                at = b.mul(number, I64(4 * shape.rows * shape.strip))
                work(chunk, b.add(self.totals, at))
                return []

            return loop(first_chunk, last_chunk, 1, [], one)

        def panel(first: Any, _: list[Any]) -> list[Any]:
            last = self.e.minimum(b.add(first, I64(shape.pairs)), args.pairs)

            def one(strip: Any, _: list[Any]) -> list[Any]:
                fill(strip, first, last)
                later = self._later(strip, strips, (first, last), args.pairs, is_last_group)

                def multiply(chunk: Any, totals: Any) -> None:
                    done = b.mul(b.sub(chunk, first_chunk), steps)
                    self._multiply(
                        args, chunk, first, last, totals,
                        lambda step: fetch(*later, b.add(done, step), turns),
                    )  # fmt: skip

                return each_chunk(strip, multiply)

            return loop(*strips, 1, [], one)

        def write(strip: Any, _: list[Any]) -> list[Any]:
            return each_chunk(strip, lambda chunk, at: self._write(args, strip, chunk, at))

        loop(I64(0), args.pairs, shape.pairs, [], panel)
        return loop(*strips, 1, [], write)

    def _later(
        self, strip: Any, strips: tuple[Any, Any], panel: tuple[Any, Any], pairs: Any,
        is_last_group: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """The strip and the first pair of the panel that comes next.

        After the last panel of these strips, that is the first panel of the next strips, or of the
        same strips for the next group of chunks.
        """
        b, (begin, end), (first, last) = self.b, strips, panel
        following = b.add(strip, I64(1))
        is_more = b.icmp_signed("<", following, end)
        is_over = b.icmp_signed(">=", last, pairs)
        next_strip = b.select(b.and_(is_over, is_last_group), end, begin)
        next_first = b.select(is_over, I64(0), last)
        return b.select(is_more, following, next_strip), b.select(is_more, first, next_first)

    def _multiply(
        self, args: PanelArgs, chunk: Any, first: Any, last: Any, totals: Any,
        fetch: Callable[[Any], None],
    ) -> None:  # fmt: skip
        """Emits the products of a chunk with the panel, pairs first..last, and adds them to the
        chunk's totals.

        Args:
            args: sizes and addresses of the call.
            chunk: number of the chunk.
            totals: address of its totals.
            fetch: given the number of a step, emits a share of the prefetches.
        """
        b, loop, shape = self.b, self.e.loop, self.shape
        is_first = b.icmp_signed("==", first, I64(0))

        def step(pair: Any, _: list[Any]) -> list[Any]:
            fetch(b.udiv(b.sub(pair, first), I64(self.tiles.pairs)))
            local = b.mul(b.sub(pair, first), I64(4 * shape.strip))
            self.tiles.multiply(self._x(args, chunk, pair), b.add(self.weights, local))
            return []

        if not shape.has_terms:
            with b.if_else(is_first) as (begin, go_on):
                with begin:
                    self.tiles.no_sums()
                with go_on:
                    self.tiles.load_sums(totals)
            loop(first, last, self.tiles.pairs, [], step)
            self.tiles.store_sums(totals)
            return

        def block_sums(start: Any) -> tuple[Add, Any]:
            stop = self.e.minimum(b.add(start, I64(shape.block_pairs)), last)
            self.tiles.no_sums()
            loop(start, stop, self.tiles.pairs, [], step)
            self.tiles.store_sums(self.block_sums)
            return self._adder(args, chunk, start, b.sub(start, first))

        if shape.rows * shape.vectors <= _REGISTER_TOTALS:
            self._add_in_registers((first, last), block_sums, totals, is_first)
        else:
            self._add_in_memory((first, last), block_sums, totals)

    def _add_in_registers(
        self, panel: tuple[Any, Any], block_sums: BlockSums, totals: Any, is_first: Any
    ) -> None:
        """Adds the panel's blocks to the totals, which stay in registers meanwhile.

        Args:
            panel: its first pair and its end.
            block_sums: emits the sums of a block.
            totals: address of the totals.
            is_first: whether this is the first panel, so that the totals begin with zeros.
        """
        load, store = self._access(totals)

        def block(start: Any, found: list[Any]) -> list[Any]:
            add, _ = block_sums(start)
            return [add(i, total, self.shape.has_offset) for i, total in enumerate(found)]

        found = [load(i, is_first) for i in range(self.shape.rows * self.shape.vectors)]
        found = self.e.loop(*panel, self.shape.block_pairs, found, block)
        for i, total in enumerate(found):
            store(i, total)

    def _add_in_memory(self, panel: tuple[Any, Any], block_sums: BlockSums, totals: Any) -> None:
        """Adds the panel's blocks to the totals in memory, where there are too many for registers;
        see _add_in_registers for the arguments."""
        b, shape = self.b, self.shape
        load, store = self._access(totals)

        def block(start: Any, _: list[Any]) -> list[Any]:
            (add, are_zero), is_first = block_sums(start), b.icmp_signed("==", start, I64(0))

            def add_all(*, offsets: bool) -> None:
                for i in range(shape.rows * shape.vectors):
                    store(i, add(i, load(i, is_first), offsets))

            if not shape.has_offset:
                add_all(offsets=False)
                return []
            # symmetric weights have zero offsets; adding those would take a tenth of the time
            with b.if_else(are_zero) as (zero, other):
                with zero:
                    add_all(offsets=False)
                with other:
                    add_all(offsets=True)
            return []

        self.e.loop(*panel, shape.block_pairs, [], block)

    def _x(self, args: PanelArgs, chunk: Any, pair: Any) -> Any:
        """Address of a chunk's rows from pair `pair` on."""
        b = self.b
        block = b.add(b.mul(chunk, args.x_blocks), b.lshr(pair, I64(4)))
        within = b.mul(b.and_(pair, I64(TILE_PAIRS - 1)), I64(4))
        at = b.add(b.mul(block, I64(ROW_BYTES * self.shape.rows)), within)
        return b.add(args.x, at)

    def _place(self, number: int) -> Any:
        """Index of a chunk's vector of sums; `number` counts them as [row][vector]."""
        return I64(number * TILE_ROWS)

    def _access(self, totals: Any) -> tuple[Callable[[int, Any], Any], Callable[[int, Any], None]]:
        """Two emitters: one loads a vector of totals by its number, as zeros where `is_first` is
        true; the other stores it."""
        b, e = self.b, self.e

        def load(number: int, is_first: Any) -> Any:
            found = e.load(totals, self._place(number), e.vector)
            return b.select(is_first, e.constant(0.0), found)

        def store(number: int, total: Any) -> None:
            e.store(total, totals, self._place(number))

        return load, store

    def _adder(self, args: PanelArgs, chunk: Any, pair: Any, local: Any) -> tuple[Add, Any]:
        """The emitter that adds a block's sums to a vector of totals, and whether all of the
        block's offsets are zero.

        It adds sum * scale, and offset * (sum of the row's inputs in the block).
        """
        b, e, shape = self.b, self.e, self.shape
        number = b.udiv(local, I64(shape.block_pairs))
        terms = b.add(self.terms, b.mul(number, I64(4 * 2 * shape.strip)))
        block = b.add(b.mul(chunk, args.blocks), b.udiv(pair, I64(shape.block_pairs)))
        x_sums = b.mul(block, I64(shape.rows))
        scales, offsets = (
            [e.load(terms, I64(at + v * TILE_ROWS), e.vector) for v in range(shape.vectors)]
            for at in (0, shape.strip)
        )

        def add(number: int, total: Any, with_offset: bool) -> Any:
            row, v = divmod(number, shape.vectors)
            sums = e.load(self.block_sums, self._place(number), e.vector)
            scaled = shape.has_scale
            total = e.fma(scales[v], sums, total) if scaled else b.fadd(total, sums)
            if not with_offset:
                return total
            x_sum = e.splat(e.load(args.x_sums, b.add(x_sums, I64(row)), F32), e.lanes)
            return e.fma(offsets[v], x_sum, total)

        bits = [b.bitcast(offset, e.words) for offset in offsets]
        lanes = ir.IntType(TILE_ROWS)
        zero = b.bitcast(b.icmp_signed("==", reduce(b.or_, bits), e.ints([0] * TILE_ROWS)), lanes)
        return add, b.icmp_signed("==", zero, lanes(-1))

    def _write(self, args: PanelArgs, strip: Any, chunk: Any, totals: Any) -> None:
        """Writes a chunk's totals to OUT."""
        b, e, shape = self.b, self.e, self.shape
        column = b.mul(strip, I64(shape.strip))
        for m in range(shape.rows):
            row = b.add(b.mul(chunk, I64(shape.rows)), I64(m))
            at = b.add(b.mul(row, args.out_stride), column)
            for v in range(shape.vectors):
                place = self._place(m * shape.vectors + v)
                value = e.load(totals, place, e.vector)
                e.store(value, args.out, b.add(at, I64(v * TILE_ROWS)))
