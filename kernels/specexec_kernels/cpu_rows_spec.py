"""What a kernel of packed weights is compiled for, and where its arguments are."""

from __future__ import annotations

from dataclasses import dataclass

from specexec_kernels.formats.base import PackedFormat

# Positions in the int64 argument array; behind them two for each part: its address, its columns
COUNTER, X, X_SUMS, CHUNKS, OUT, UNITS, OUTPUTS, STRIPS, AT_ONCE, SCRATCH, PARTS = range(11)
TILE_INPUTS = 128  # at least, of a tile in the L1 cache
# Codes that go down the inputs lie in lines, each for one or more inputs:
TILE_LINES = 64  # that a tile reads side by side; a CPU follows no more of them in memory
WIDE_OUTPUTS = 8192  # the most of a claim: long parts of a line are read faster


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """What a kernel is compiled for."""

    format: PackedFormat
    dot: bool  # pairs of bfloat16; otherwise float32
    rows: int  # of a chunk
    vectors: int  # of outputs in a strip
    lanes: int
    few: bool  # one chunk, multiplied from the registers
    tiles: bool = False  # pairs are multiplied in tiles, see cpu_tiles_ir
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
    def goes_down(self) -> bool:
        """See PackedFormat."""
        return self.format.goes_down

    @property
    def claim_outputs(self) -> int:
        """The most outputs of a claim, where codes go down the inputs; with an index fewer, since
        the terms of all groups lie in the caches too."""
        return WIDE_OUTPUTS // 2 if self.format.index else WIDE_OUTPUTS

    @property
    def has_scale(self) -> bool:
        """Whether a block's sums are scaled; with an index, values are."""
        return self.format.has_scale and not self.format.index

    @property
    def has_offset(self) -> bool:
        """Likewise."""
        return self.format.has_offset and not self.format.index

    @property
    def block_units(self) -> int:
        """Units that a block reaches over."""
        return max(self.format.block // self.format.unit, 1)
