"""LLVM IR of bfloat16 rows times weights, where the CPU multiplies pairs of bfloat16 (vdpbf16ps).

A strip of outputs goes through the inputs block by block. A block of its weights becomes pairs of
bfloat16, one 32-bit lane for two inputs of an output, in the registers (few rows) or in the L1
cache (more rows), and every chunk of rows multiplies with it; the chunk's sums live in registers
(the register tiling of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication",
2008). How weights become pairs is cpu_dot_stored_ir's.

Where the CPU multiplies tiles (AMX) a panel of blocks becomes pairs in the L1 cache likewise, and
cpu_panels_ir multiplies and sums, with a rounding of its own.

Rounding of vdpbf16ps: products are exact, sums are float32 as the instruction rounds them (to
nearest, numbers below the normal range to zero), in the order of the pairs inside a block and then
of the blocks.
That order is the same for any rows and any number of threads: a row's bits are its own.

Knows nothing of torch or thread pools.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import I16, I64, Bfloat, Emitter
from specexec_kernels.cpu_panels_ir import PanelArgs, Panels, PanelShape

LANES = 16  # every CPU with the instruction has registers of 512 bits
X_PAIRS = 16  # pairs of one row of X that lie side by side
UNROLL = 4  # pairs per turn of the multiplying loop


class Products(Emitter, ABC):
    """The frame. A form has `spec` with rows, vectors and strip, and `arg` with the common names.

    Attributes:
        units: the inputs, in the form's units.
        unit_pairs: pairs of one unit; divides X_PAIRS.
        block_units: units of a block.
    """

    spec: Any
    units: Any
    unit_pairs: int
    block_units: int

    def begin(self, arg: Any, names: Any) -> None:
        """Take the common arguments and declare the instructions."""
        self.x, self.out = arg[names.X], arg[names.OUT]
        self.chunks, self.x_blocks = arg[names.CHUNKS], arg[names.X_BLOCKS]
        self.out_stride, self.units = arg[names.OUT_STRIDE], arg[names.UNITS]
        self.claims = arg[names.FIRST_STRIP], arg[names.END_STRIP], arg[names.STRIPS_AT_ONCE]
        self.pairs = ir.VectorType(Bfloat(), 2 * LANES)
        self.shorts = ir.VectorType(I16, 2 * LANES)
        self.block: Any = None
        if self.spec.mode == "tiles":
            self.panels = Panels(self, self.panel_shape())
            return
        module = self.b.function.module
        dot = ir.FunctionType(self.vector, [self.vector, self.pairs, self.pairs])
        self._dot = ir.Function(module, dot, "llvm.x86.avx512bf16.dpbf16ps.512")

    def reserve_block(self) -> None:
        """Memory on the stack for the pairs of a block, [pair][output]."""
        self.block = self.reserve(self.block_units * self.unit_pairs * self.spec.strip)

    @abstractmethod
    def fill(self, strip: Any, first: Any, last: Any) -> None:
        """Put the pairs of units first..last into the block."""

    @abstractmethod
    def unit_words(self, unit: Any, strip: Any) -> Iterator[list[Any]]:
        """For each pair of a unit one vector of pairs (as int32 lanes) per vector of the strip."""

    @abstractmethod
    def add_block(self, before: Any, sums: Any, vector: int) -> Any:
        """What OUT is after a block, in one vector of the strip."""

    def fetch_ahead(self, strip: Any, last: Any, chunk: Any, pair: Any) -> None:
        """Ask for a part of the block that begins with unit `last`, at pair `pair` of a chunk."""

    def emit(self) -> None:
        """Claim tiles of strips until none is left."""
        b = self.b
        counter = self.ptr(b.ptrtoint(b.function.args[0], I64), I64(0), 8)
        if self.spec.mode != "tiles":
            self.claim_strips(counter, *self.claims, self.tile)
            return
        args = PanelArgs(
            pairs=b.mul(self.units, I64(self.unit_pairs)), x=self.x, x_blocks=self.x_blocks,
            x_sums=I64(0), blocks=I64(0), chunks=self.chunks, out=self.out,
            out_stride=self.out_stride,
        )  # fmt: skip
        per_unit = I64(self.unit_pairs)

        def fill(strip: Any, first: Any, last: Any) -> None:
            self.block = self.panels.weights
            self.fill_panel(strip, b.udiv(first, per_unit), b.udiv(last, per_unit))

        def fetch(strip: Any, first: Any, turn: Any, turns: Any) -> None:
            self.fetch_panel(strip, b.udiv(first, per_unit), turn, turns)

        self.panels.emit(counter, self.claims, args, fill, fetch)

    @abstractmethod
    def panel_shape(self) -> PanelShape:
        """What is kept in the caches where products are made in tiles."""

    def fetch_panel(self, strip: Any, first: Any, turn: Any, turns: Any) -> None:
        """Ask for part `turn` of `turns` of the strip's panel that begins with unit `first`."""

    def fill_panel(self, strip: Any, first: Any, last: Any) -> None:
        """Put units first..last of a strip into the panel that begins with them."""
        self.fill(strip, first, last)

    @abstractmethod
    def tile(self, start: Any, stop: Any) -> None:
        """Strips start..stop, in the order in which their weights lie in memory."""

    def block_of(self, strip: Any, first: Any) -> list[Any]:
        """The block of a strip that begins with unit `first`."""
        last = self.minimum(self.b.add(first, I64(self.block_units)), self.units)
        return self.strip_block(strip, first, last)

    def strip_block(self, strip: Any, first: Any, last: Any) -> list[Any]:
        """One block of a strip, multiplied with every row."""
        b = self.b
        zeros = [ir.Constant(self.vector, [0.0] * LANES)] * (self.spec.rows * self.spec.vectors)
        if self.block is None:

            def unit(u: Any, sums: list[Any]) -> list[Any]:
                pair = b.mul(u, I64(self.unit_pairs))
                for j, words in enumerate(self.unit_words(u, strip)):
                    sums = self.multiply(I64(0), pair, j, words, sums)
                return sums

            self.add_sums(I64(0), strip, first, self.loop(first, last, 1, zeros, unit))
            return []
        self.fill(strip, first, last)
        first_pair = b.mul(first, I64(self.unit_pairs))
        last_pair = b.mul(last, I64(self.unit_pairs))
        unroll = min(UNROLL, self.unit_pairs)

        def chunk(c: Any, _: list[Any]) -> list[Any]:
            def step(pair: Any, sums: list[Any]) -> list[Any]:
                at = b.mul(b.sub(pair, first_pair), I64(self.spec.strip))
                self.fetch_ahead(strip, last, c, b.sub(pair, first_pair))
                for j in range(unroll):
                    places = [
                        b.add(at, I64(j * self.spec.strip + v * LANES))
                        for v in range(self.spec.vectors)
                    ]
                    words = [self.load(self.block, place, self.words) for place in places]
                    sums = self.multiply(c, pair, j, words, sums)
                return sums

            sums = self.loop(first_pair, last_pair, unroll, zeros, step)
            self.add_sums(c, strip, first, sums)
            return []

        return self.loop(I64(0), self.chunks, 1, [], chunk)

    def x_pairs(self, chunk: Any, pair: Any, j: int, row: int) -> Any:
        """Pair `pair` + j of a row in every lane.

        X is (chunks, X_BLOCKS, rows, X_PAIRS) pairs, in the order of the form's pairs: neighbouring
        rows are a cache line apart whatever the number of inputs, and 16 pairs share one.
        """
        b, rows = self.b, self.spec.rows
        block = b.add(b.mul(chunk, self.x_blocks), b.ashr(pair, I64(4)))
        at = b.add(b.mul(block, I64(rows * X_PAIRS)), b.and_(pair, I64(X_PAIRS - 1)))
        word = self.load(self.x, b.add(at, I64(row * X_PAIRS + j)), ir.IntType(32))
        return self.splat(word, LANES)

    def multiply(
        self, chunk: Any, pair: Any, j: int, words: list[Any], sums: list[Any]
    ) -> list[Any]:
        """Add one pair of inputs to the sums, ordered [row][vector]."""
        b, sums = self.b, list(sums)
        weights = [b.bitcast(word, self.pairs) for word in words]
        for m in range(self.spec.rows):
            x = b.bitcast(self.x_pairs(chunk, pair, j, m), self.pairs)
            for v, weight in enumerate(weights):
                i = m * self.spec.vectors + v
                sums[i] = b.call(self._dot, [sums[i], weight, x])
        return sums

    def add_sums(self, chunk: Any, strip: Any, first: Any, sums: list[Any]) -> None:
        """Add a block's sums to OUT, which the first block writes."""
        b, spec = self.b, self.spec
        column = b.mul(strip, I64(spec.strip))
        is_first = b.icmp_signed("==", first, I64(0))
        nothing = ir.Constant(self.vector, [0.0] * LANES)
        for m in range(spec.rows):
            row = b.add(b.mul(chunk, I64(spec.rows)), I64(m))
            at = b.add(b.mul(row, self.out_stride), column)
            for v in range(spec.vectors):
                place = b.add(at, I64(v * LANES))
                before = b.select(is_first, nothing, self.load(self.out, place, self.vector))
                after = self.add_block(before, sums[m * spec.vectors + v], v)
                self.store(after, self.out, place)
