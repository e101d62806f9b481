"""What the block formats of GGUF files have in common; the table of them is in gguf.

Rows are runs of blocks, each of a fixed number of weights with scales of its own:
W = scale * level + offset, of which scale and offset belong to a group within the block. Layouts
are those of ggml-common.h and the rounding of ggml-quants.c (ggml-org/llama.cpp): in float32, the
product first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from specexec_kernels.formats.base import PackedFormat, Part

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes


class GgmlFormat(PackedFormat):
    """A format of blocks; a subclass states `unit`, the block's bytes, and how it is read."""

    block_bytes: ClassVar[int]
    group: ClassVar[int]  # weights that share scale and offset

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("weight", "U8", items=self.block_bytes, inputs=self.unit),)

    @property
    def block(self) -> int:
        return self.group

    @abstractmethod
    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Scales, offsets (None: 0) and levels.

        Args:
            blocks: (blocks, bytes) uint8.
        Returns:
            (blocks, groups), (blocks, groups), (blocks, weights), all float32.
        """

    def unpack(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        blocks = tensors["weight"].reshape(-1, self.block_bytes)
        scale, offset, levels = self.read(blocks)
        weights = scale[..., None] * levels.view(*scale.shape, self.group)
        if offset is not None:
            weights = weights + offset[..., None]
        return weights.reshape(outputs, inputs)


def halves(blocks: Tensor, place: int) -> Tensor:
    """(blocks, 1) float32: the float16 at a byte of each block."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


def nibbles(codes: Tensor) -> Tensor:
    """(blocks, bytes) to (blocks, 2 * bytes): all lower nibbles, then all higher ones."""
    return torch.cat((codes & 15, codes >> 4), dim=1)


def fields(codes: Tensor, width: int, bits: int, run: int) -> Tensor:
    """Fields of each byte, lowest first, of one run of bytes after the other.

    Args:
        codes: (blocks, bytes) uint8.
        width: bits from one field to the next.
        bits: of a field.
        run: bytes whose lowest fields stand together, then their next ones, and so on.
    Returns:
        (blocks, bytes * 8 / width) uint8.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    runs = codes.reshape(len(codes), -1, 1, run) >> shifts[:, None]
    return (runs & (2**bits - 1)).reshape(len(codes), -1)


def nibble_order(runs: int, run: int) -> Iterator[int]:
    """The weights of a block in the order in which `nibble_pairs` yields them.

    Args:
        runs: of bytes, whose lower nibbles are `run` weights and whose higher ones the next.
    """
    for first in range(0, 2 * run * runs, 2 * run):
        for word in range(0, run, 4):
            for high in (0, run):
                yield from (first + high + word + byte for byte in (0, 2, 1, 3))


# bits of a word where pairs of nibbles begin, the other half 16 bits further: bytes 0 and 2, then 1
# and 3, of which the lower nibbles come first
NIBBLE_PAIRS = (0, 8, 4, 12)


def nibble_values(lanes: Lanes, words: list[Any], table: tuple[float, ...]) -> Iterator[Any]:
    """table[code] of each nibble in float32."""
    for word in words:
        for first in NIBBLE_PAIRS:
            for half in (0, 16):
                yield lanes.table(table, lanes.bits(word, first + half, 4))


def nibble_pairs(lanes: Lanes, words: list[Any], table: tuple[float, ...]) -> Iterator[Any]:
    """table[code] of each nibble as pairs of bfloat16, which must hold the table exactly."""
    for word in words:
        for first in NIBBLE_PAIRS:
            yield lanes.table_pair(table, word, first)
