"""What a kernel of products is compiled for, and where its arguments are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specexec_kernels.formats.base import PackedFormat

# Positions in the int64 argument array; behind them two for each part: its address, its columns
COUNTER, X, X_SUMS, CHUNKS, OUT, UNITS, OUTPUTS, STRIPS, AT_ONCE, SCRATCH, PARTS = range(11)
TILE_INPUTS = 128  # at least, of a tile in the L1 cache
TILE_LINES = 64  # of a tensor that goes down the inputs; a CPU follows no more of them in memory


@dataclass(frozen=True, slots=True)
class MatmulSpec:
    """What a kernel is compiled for."""

    format: PackedFormat
    dot: bool  # an item is a pair of bfloat16; otherwise a float32
    rows: int  # of a chunk
    vectors: int  # of outputs in a strip
    lanes: int
    # few: one chunk, which multiplies with items in registers; many: all chunks multiply with a
    # tile of items in the L1 cache; tiles: as many, in tile registers (cpu_panels_ir)
    mode: Literal["few", "many", "tiles"]
    byte_tables: bool = False  # whether the CPU looks bytes up in tables of 128 (AVX512-VBMI)

    @property
    def strip(self) -> int:
        """Outputs of a strip."""
        return self.vectors * self.lanes

    @property
    def per_item(self) -> int:
        """Inputs of an item."""
        return 2 if self.dot else 1

    @property
    def unit_items(self) -> int:
        """Items of a unit in one output."""
        return self.format.unit // self.per_item

    @property
    def block_items(self) -> int:
        """Items of a block in one output."""
        return self.format.block // self.per_item

    @property
    def tile_units(self) -> int:
        """Units of a tile: whole blocks."""
        block, codes = max(self.format.block, self.format.unit), self.format.parts[0]
        inputs = TILE_INPUTS
        if codes.down:
            inputs = min(inputs, TILE_LINES * codes.inputs // codes.items)
        return block * max(inputs // block, 1) // self.format.unit

    @property
    def unit_blocks(self) -> int:
        """Blocks that begin in a unit."""
        return max(self.format.unit // self.format.block, 1)

    @property
    def block_units(self) -> int:
        """Units that a block reaches over."""
        return max(self.format.block // self.format.unit, 1)

    @property
    def goes_down(self) -> bool:
        """See PackedFormat."""
        return self.format.goes_down

    @property
    def chained(self) -> bool:
        """See PackedFormat."""
        return self.format.chained

    @property
    def has_scale(self) -> bool:
        """Whether a block's sums are scaled. With an index, single values are."""
        return self.format.has_scale and not self.format.index

    @property
    def has_offset(self) -> bool:
        """Whether a block's offset is added. With an index, it is added to single values."""
        return self.format.has_offset and not self.format.index
