"""What a matmul kernel is compiled for, and where its arguments are.

cpu_matmul_ir explains the words: item, unit, block, tile, strip and chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specexec_kernels.cpu_ir_emit import Quads
from specexec_kernels.formats.base import PackedFormat

# Positions in the int64 argument array. From PARTS on, each tensor of the format (see Part) has
# two: its address and its number of columns.
COUNTER, X, X_SUMS, CHUNKS, OUT, UNITS, OUTPUTS, STRIPS, AT_ONCE, SCRATCH, PARTS = range(11)
# Of whole numbers, a row has three numbers for each block: the sum of the block's inputs, the step
# that they are multiples of, and what the int32 sum of a block begins with.
X_SUM, X_STEP, X_BEGIN, TERMS_OF_WHOLE = range(4)
ROUNDED_INPUTS = 32  # inputs of a row that share a step where it is rounded to 8 bits
TILE_INPUTS = 128  # inputs of a tile in the L1 cache; one block where a block is longer
# The most lines of a tile, of a tensor with a line for each input: a CPU's prefetcher follows no
# more than these in memory.
TILE_LINES = 64


@dataclass(frozen=True, slots=True)
class MatmulSpec:
    """What a matmul kernel is compiled for.

    Attributes:
        format: of the weights.
        dot: whether an item is a pair of bfloat16; otherwise it is a float32, or a pair of int16.
        rows: rows of a chunk.
        vectors: vector registers of outputs in a strip.
        lanes: float32 lanes of a vector register.
        mode: "few": there is one chunk, and items are multiplied in registers as they are unpacked.
            "many": a tile of items is unpacked to the L1 cache, and every chunk is multiplied by
            it. "tiles": as "many", in the CPU's tile registers (cpu_panels_ir).
        byte_tables: whether the CPU looks up bytes in tables of 128 entries (AVX512-VBMI).
        whole: bits of the whole numbers that rows consist of; 0 where they are floats. An item is
            then a pair of int16 or, with `quads`, four bytes; products are summed as int32.
        quads: the instruction that multiplies four bytes at a time; None where an item is a pair.
    """

    format: PackedFormat
    dot: bool
    rows: int
    vectors: int
    lanes: int
    mode: Literal["few", "many", "tiles"]
    byte_tables: bool = False
    whole: Literal[0, 8, 16] = 0
    quads: Quads | None = None

    @property
    def strip(self) -> int:
        """Outputs of a strip."""
        return self.vectors * self.lanes

    @property
    def per_item(self) -> int:
        """Inputs of an item."""
        if self.quads:
            return 4
        return 2 if self.dot or self.whole else 1

    @property
    def block(self) -> int:
        """Inputs of a block: those of the format's, but at most those that share a step where rows
        are rounded to 8 bits."""
        own = self.format.block
        return min(own, ROUNDED_INPUTS) if self.whole == 8 else own

    @property
    def x_terms(self) -> int:
        """Numbers that the rows have for each block; see cpu_arrange_ir."""
        return TERMS_OF_WHOLE if self.whole else 1

    @property
    def unit_items(self) -> int:
        """Items of a unit, for one output."""
        return self.format.unit // self.per_item

    @property
    def block_items(self) -> int:
        """Items of a block, for one output."""
        return self.block // self.per_item

    @property
    def tile_units(self) -> int:
        """Units of a tile, which consists of whole blocks."""
        block, codes = max(self.block, self.format.unit), self.format.parts[0]
        inputs = TILE_INPUTS
        if codes.down:
            inputs = min(inputs, TILE_LINES * codes.inputs // codes.items)
        return block * max(inputs // block, 1) // self.format.unit

    @property
    def unit_blocks(self) -> int:
        """Blocks that begin in a unit."""
        return max(self.format.unit // self.block, 1)

    @property
    def block_units(self) -> int:
        """Units that a block covers, 1 where a unit has several blocks."""
        return max(self.block // self.format.unit, 1)

    @property
    def goes_down(self) -> bool:
        """See PackedFormat.goes_down."""
        return self.format.goes_down

    @property
    def chained(self) -> bool:
        """See PackedFormat.chained."""
        return self.format.chained

    @property
    def has_scale(self) -> bool:
        """Whether a block's sums are scaled. In a format with an index, each value is instead."""
        return self.format.has_scale and not self.format.index

    @property
    def has_offset(self) -> bool:
        """Whether a block's offset is added to its sums. In a format with an index, the offset is
        added to each value instead."""
        return self.format.has_offset and not self.format.index
