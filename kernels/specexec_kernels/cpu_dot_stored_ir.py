"""Weights stored in bfloat16, in the frame of cpu_dot_ir: transposed into pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, Literal

from llvmlite import ir

from specexec_kernels.cpu_dot_ir import LANES, UNROLL, Products
from specexec_kernels.cpu_ir_emit import I64, build_module
from specexec_kernels.cpu_panels_ir import PanelShape

STORED_BLOCK = 256  # inputs; with a strip of 32 outputs 16 KiB, half of the smallest L1 cache
AHEAD = 8  # units of stored weights that are asked for before they are multiplied
AHEAD_IN_TILES = 4  # likewise, within a panel


class StoredArg(IntEnum):
    """Positions in the int64 argument array of a StoredDot; addresses and sizes."""

    COUNTER = 0  # next strip to claim; set to 0 before a call
    WEIGHT = auto()  # (outputs, inputs) bfloat16, row-major
    X = auto()  # see Products.x_pairs
    CHUNKS = auto()
    OUT = auto()  # float32 (chunks * rows, stride)
    OUT_STRIDE = auto()
    UNITS = auto()  # inputs / 32
    X_BLOCKS = auto()
    FIRST_STRIP = auto()
    END_STRIP = auto()
    STRIPS_AT_ONCE = auto()  # of one claim


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """What a StoredDot is compiled for."""

    rows: int  # of a chunk
    vectors: int  # of outputs in a strip; few: 1
    mode: Literal["few", "many", "tiles"]  # few: one chunk, multiplied from the registers

    @property
    def strip(self) -> int:
        """Outputs of a strip."""
        return self.vectors * LANES


class StoredDot(Products):
    """Weights stored in bfloat16."""

    unit_pairs = LANES
    block_units = STORED_BLOCK // (2 * LANES)

    def __init__(self, spec: StoredSpec, function: ir.Function) -> None:
        super().__init__(ir.IRBuilder(function.append_basic_block("entry")), LANES)
        self.spec = spec
        base = self.b.ptrtoint(function.args[0], I64)
        self.arg = {arg: self.load(base, I64(arg), I64, 8) for arg in StoredArg}
        self.begin(self.arg, StoredArg)
        if spec.mode == "many":
            self.reserve_block()
        per_chunk = spec.strip * UNROLL // LANES  # cache lines of a block for each turn of a chunk
        up = self.b.add(self.chunks, I64(per_chunk - 1))
        self.lines_per_turn = self.b.udiv(up, self.chunks)

    def tile(self, start: Any, stop: Any) -> None:
        def strip(number: Any, _: list[Any]) -> list[Any]:
            return self.loop(
                I64(0), self.units, self.block_units, [], lambda u, _: self.block_of(number, u)
            )

        self.loop(start, stop, 1, [], strip)

    def unit_words(self, unit: Any, strip: Any) -> Iterator[list[Any]]:
        b = self.b
        words = b.mul(self.units, I64(LANES))  # of one output
        output, local = b.mul(strip, I64(LANES)), b.mul(unit, I64(LANES))
        # at the end of its output's weights the next strip's begin
        later = b.add(unit, I64(AHEAD))
        is_next = b.icmp_signed(">=", later, self.units)
        skipped = b.select(is_next, b.mul(words, I64(LANES - 1)), I64(0))
        rows = []
        for lane in range(LANES):
            at = b.add(b.mul(b.add(output, I64(lane)), words), local)
            ahead = b.add(b.add(at, skipped), I64(AHEAD * LANES))
            self.prefetch(self.arg[StoredArg.WEIGHT], ahead)
            rows.append(self.load(self.arg[StoredArg.WEIGHT], at, self.words))
        for word in self.transpose(rows):
            yield [word]

    def fill(self, strip: Any, first: Any, last: Any) -> None:
        b, strip_outputs = self.b, self.spec.strip
        words = b.mul(self.units, I64(LANES))  # of one output
        output = b.mul(strip, I64(strip_outputs))

        def unit(u: Any, _: list[Any]) -> list[Any]:
            local = b.mul(b.sub(u, first), I64(LANES * strip_outputs))

            def vector(start: Any, _: list[Any]) -> list[Any]:
                rows = []
                for lane in range(LANES):
                    row = b.add(b.add(output, start), I64(lane))
                    at = b.add(b.mul(row, words), b.mul(u, I64(LANES)))
                    if self.spec.mode == "tiles":
                        ahead = b.add(at, I64(AHEAD_IN_TILES * LANES))
                        self.prefetch(self.arg[StoredArg.WEIGHT], ahead)
                    rows.append(self.load(self.arg[StoredArg.WEIGHT], at, self.words))
                for pair, word in enumerate(self.transpose(rows)):
                    place = b.add(start, I64(pair * strip_outputs))
                    self.store(word, self.block, b.add(local, place))
                return []

            return self.loop(I64(0), I64(strip_outputs), LANES, [], vector)

        self.loop(first, last, 1, [], unit)

    def panel_shape(self) -> PanelShape:
        pairs = STORED_BLOCK // 2
        return PanelShape(
            rows=self.spec.rows, vectors=self.spec.vectors, pairs=pairs, block_pairs=pairs,
            few_totals=1, has_scale=False, has_offset=False,
        )  # fmt: skip

    def add_block(self, before: Any, sums: Any, vector: int) -> Any:
        return self.b.fadd(before, sums)

    def fetch_ahead(self, strip: Any, last: Any, chunk: Any, pair: Any) -> None:
        """Spread over the multiplying: all at once they would wait for memory, one for another."""
        b = self.b
        turns = self.block_units * self.unit_pairs // UNROLL  # of a chunk
        turn = b.add(b.mul(chunk, I64(turns)), b.udiv(pair, I64(UNROLL)))
        self._fetch(strip, last, turn, self.lines_per_turn)

    def fetch_panel(self, strip: Any, first: Any, turn: Any, turns: Any) -> None:
        b, lines = self.b, self.spec.strip * self.block_units
        up = b.add(turns, I64(lines - 1))
        per_turn = b.udiv(up, turns)
        self._fetch(strip, first, turn, per_turn)

    def _fetch(self, strip: Any, first: Any, turn: Any, per_turn: Any) -> None:
        """Ask for some lines of the block that begins with unit `first`."""
        b = self.b
        lines = self.spec.strip * self.block_units  # a unit of an output is a cache line
        words = b.mul(self.units, I64(LANES))

        def line(number: Any, _: list[Any]) -> list[Any]:
            output = b.add(
                b.mul(strip, I64(self.spec.strip)), b.udiv(number, I64(self.block_units))
            )
            unit = b.add(first, b.urem(number, I64(self.block_units)))
            at = b.add(b.mul(output, words), b.mul(unit, I64(LANES)))
            self.prefetch(self.arg[StoredArg.WEIGHT], at)
            return []

        start = b.mul(turn, per_turn)
        stop = self.minimum(b.add(start, per_turn), I64(lines))
        self.loop(start, stop, 1, [], line)


def build_stored(spec: StoredSpec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for bfloat16 weights."""
    return build_module(name, lambda function: StoredDot(spec, function).emit())
