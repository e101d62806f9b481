"""LLVM IR of the tile registers of a CPU with AMX (tdpbf16ps), which cpu_panels_ir uses.

A tile register has up to 16 rows of 64 bytes. One instruction multiplies 16 rows of X, each of 16
pairs of bfloat16, by 16 pairs of weights for each of 16 outputs, and adds the products to 16 x 16
float32 sums.

Rounding (Intel's manual, TDPBF16PS): products are exact. The products of the pairs' first inputs
and those of their second inputs are summed separately, each from zero on in the order of the pairs.
The two sums are added to one another, and the result to the sum so far. Each addition rounds to
nearest; numbers below the normal range are zero. The number of rows of a tile changes none of this,
so a row's bits are its own. They differ from those of vdpbf16ps, so a weight is multiplied in one
of the two ways only, whatever the number of rows.

Knows nothing of torch, of formats, or of thread pools.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import I8, I64, PTR

# Rows of X in a tile. Also the outputs of a tile of sums: as many as a vector register has lanes.
TILE_ROWS = 16
TILE_PAIRS = 16  # pairs of one row of X that lie side by side
ROW_BYTES = 64  # bytes of a tile's row
_CONFIG_BYTES = 64
_PALETTE = 1
_WIDTHS_AT, _HEIGHTS_AT = 16, 48  # bytes of the configuration where tiles' widths and heights begin
_SUMS, _X, _WEIGHTS = 0, 4, 6  # first register of each: 4 tiles of sums, 2 of X, 2 of weights


class Tiles:
    """Emits the tile instructions: up to 32 rows times one or two vectors of outputs."""

    def __init__(self, builder: ir.IRBuilder, rows: int, vectors: int, pairs: int) -> None:
        """Declares the instructions.

        Args:
            builder: of the kernel.
            rows: rows of X, up to 16, or 32.
            vectors: vectors of 16 outputs, 1 or 2.
            pairs: pairs of one row in a tile, up to 16.
        """
        self.b, self.pairs = builder, pairs
        self.rows = min(rows, TILE_ROWS)
        self.row_tiles, self.vectors = rows // self.rows, vectors
        self._load = self._declared("tileloadd64", [I8, PTR, I64])
        self._store = self._declared("tilestored64", [I8, PTR, I64])
        self._zero = self._declared("tilezero", [I8])
        self._multiply = self._declared("tdpbf16ps", [I8] * 3)
        self._configure = self._declared("ldtilecfg", [PTR])
        self._configured = self._declared("sttilecfg", [PTR])
        self._before = self._memory()

    def _declared(self, name: str, arguments: list[Any]) -> Any:
        typ = ir.FunctionType(ir.VoidType(), arguments)
        return ir.Function(self.b.function.module, typ, f"llvm.x86.{name}")

    def _memory(self) -> Any:
        memory = self.b.alloca(ir.ArrayType(I8, _CONFIG_BYTES))
        memory.align = 64
        return self.b.bitcast(memory, PTR)

    def begin(self) -> None:
        """Sets the tiles' shapes, and keeps the shapes set before for `end`.

        Another library that computes in tiles may rely on the shapes that it set.
        """
        self.b.call(self._configured, [self._before])
        sums, x, weights = (self.rows, 64), (self.rows, 4 * self.pairs), (self.pairs, 64)
        config = bytearray(_CONFIG_BYTES)
        config[0] = _PALETTE
        for tile, (height, width) in enumerate([sums] * 4 + [x] * 2 + [weights] * 2):
            config[_WIDTHS_AT + 2 * tile] = width
            config[_HEIGHTS_AT + tile] = height
        memory = self._memory()
        self.b.store(ir.Constant(ir.ArrayType(I8, _CONFIG_BYTES), config), memory)
        self.b.call(self._configure, [memory])

    def end(self) -> None:
        """Sets the tiles' shapes as they were before `begin`."""
        self.b.call(self._configure, [self._before])

    def no_sums(self) -> None:
        """Sets the sums to zero."""
        for number, *_ in self._sums():
            self.b.call(self._zero, [I8(number)])

    def load_sums(self, at: Any) -> None:
        """Reads the sums from memory, [row][output]."""
        self._move_sums(self._load, at)

    def store_sums(self, at: Any) -> None:
        """Writes the sums to memory, [row][output]."""
        self._move_sums(self._store, at)

    def multiply(self, x: Any, weights: Any) -> None:
        """Adds the products of the rows and the weights to the sums.

        Args:
            x: address of the first row's pairs; rows are 64 bytes apart.
            weights: address of the weights, [pair][output].
        """
        for t in range(self.row_tiles):
            place = self.b.add(x, I64(ROW_BYTES * TILE_ROWS * t))
            self._move(self._load, _X + t, place, ROW_BYTES)
        for v in range(self.vectors):
            place = self.b.add(weights, I64(ROW_BYTES * v))
            self._move(self._load, _WEIGHTS + v, place, ROW_BYTES * self.vectors)
            for number, t, own in self._sums():
                if own == v:
                    self.b.call(self._multiply, [I8(number), I8(_X + t), I8(_WEIGHTS + v)])

    def _sums(self) -> list[tuple[int, int, int]]:
        """The tiles of sums, each as (register, number of its tile of rows, number of its
        vector)."""
        pairs = [(t, v) for t in range(self.row_tiles) for v in range(self.vectors)]
        return [(_SUMS + number, t, v) for number, (t, v) in enumerate(pairs)]

    def _move_sums(self, instruction: Any, at: Any) -> None:
        width = ROW_BYTES * self.vectors
        for number, t, v in self._sums():
            place = self.b.add(at, I64(t * TILE_ROWS * width + v * ROW_BYTES))
            self._move(instruction, number, place, width)

    def _move(self, instruction: Any, tile: int, at: Any, stride: int) -> None:
        self.b.call(instruction, [I8(tile), self.b.inttoptr(at, PTR), I64(stride)])
