"""What the block formats of GGUF files have in common; gguf.py has the table of them.

The weights of an output are a run of blocks. A block has a fixed number of weights, in one or more
groups: W = scale * level + offset, with one scale and one offset for each group. Layouts are those
of ggml-common.h (ggml-org/llama.cpp), and rounding is that of ggml-quants.c: float32, the product
first, then the sum.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from specexec_kernels.formats.base import PackedFormat, Part, TritonForm

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes


ALIGNED_BYTES = 16  # that a GPU loads at once


class GgmlFormat(PackedFormat):
    """A format of blocks. A subclass states `unit`, the weights of a block, and the following."""

    block_bytes: ClassVar[int]
    group: ClassVar[int]  # weights that share scale and offset
    # (first, last) bytes of the pieces of a block in the order in which they lie apart, see Apart
    pieces: ClassVar[tuple[tuple[int, int], ...]] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("weight", "U8", items=self.block_bytes, inputs=self.unit),)

    @property
    def block(self) -> int:
        return self.group

    @abstractmethod
    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Reads the scales, offsets (None: 0) and levels of blocks.

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

    def staying(self, inputs: int) -> Apart | None:
        row_bytes = inputs // self.unit * self.block_bytes
        return Apart(self) if self.pieces and row_bytes % ALIGNED_BYTES == 0 else None

    def rearrange(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Has the rows' blocks taken apart; see Apart."""
        weight = tensors["weight"]
        blocks = weight.view(len(weight), -1, self.block_bytes)
        rearranged, taken = torch.empty_like(weight), 0
        for first, last in self.pieces:
            size = blocks.shape[1] * (last - first)
            place = rearranged[:, taken : taken + size].view(*blocks.shape[:2], last - first)
            place.copy_(blocks[..., first:last])
            taken += size
        return {"weight": rearranged}

    def apart(self) -> TritonForm:
        """How Triton kernels read the format `Apart(self)`."""
        raise NotImplementedError(f"{self.name} has no pieces")


@dataclass(frozen=True, slots=True)
class Apart(PackedFormat):
    """Blocks of a GGUF format taken apart: an output has the first pieces of all its blocks, then
    the second ones, and so on.

    Blocks of 18, 34 and 210 bytes begin anywhere, and so do the codes in them. Taken apart, codes
    begin where a GPU loads 16 bytes at once.
    """

    blocks: GgmlFormat
    compiled: ClassVar[bool] = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.blocks.name

    @property
    def unit(self) -> int:  # type: ignore[override]
        return self.blocks.unit

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.blocks.parts

    def unpack(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        weight, count, taken = tensors["weight"], inputs // self.unit, 0
        shape = outputs, count, self.blocks.block_bytes
        whole = torch.empty(shape, dtype=torch.uint8, device=weight.device)
        for first, last in self.blocks.pieces:
            piece = weight[:, taken : taken + count * (last - first)]
            whole[..., first:last] = piece.view(outputs, count, last - first)
            taken += count * (last - first)
        return self.blocks.unpack({"weight": whole}, outputs, inputs)

    def triton(self) -> TritonForm:
        return self.blocks.apart()


def halves(blocks: Tensor, place: int) -> Tensor:
    """The float16 at byte `place` of each block, as (blocks, 1) float32."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


def nibbles(codes: Tensor) -> Tensor:
    """The nibbles of (blocks, bytes) as (blocks, 2 * bytes): the lower ones, then the higher."""
    return torch.cat((codes & 15, codes >> 4), dim=1)


def fields(codes: Tensor, width: int, bits: int, run: int) -> Tensor:
    """Cuts bytes into fields: the lowest fields of a run of bytes, then their next ones, and so on;
    then those of the next run.

    Args:
        codes: (blocks, bytes) uint8.
        width: bits from one field to the next.
        bits: bits of a field.
        run: bytes of a run.
    Returns:
        (blocks, bytes * 8 / width) uint8.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    runs = codes.reshape(len(codes), -1, 1, run) >> shifts[:, None]
    return (runs & (2**bits - 1)).reshape(len(codes), -1)


def nibble_order(runs: int, run: int) -> Iterator[int]:
    """The numbers of a block's weights in the order in which `nibble_pairs` yields them.

    Args:
        runs: number of runs of bytes in a block.
        run: bytes of a run. Their lower nibbles are `run` weights, their higher ones the next.
    """
    for first in range(0, 2 * run * runs, 2 * run):
        for word in range(0, run, 4):
            for high in (0, run):
                yield from (first + high + word + byte for byte in (0, 2, 1, 3))


# The bits of a word where the first nibble of a pair begins; the second is 16 bits higher. So bytes
# 0 and 2 are paired, and bytes 1 and 3: first their lower nibbles, then their higher ones.
NIBBLE_PAIRS = (0, 8, 4, 12)


def nibble_values(lanes: Lanes, words: list[Any], table: tuple[float, ...]) -> Iterator[Any]:
    """Emits table[code] for each nibble, in float32."""
    for word in words:
        for first in NIBBLE_PAIRS:
            for half in (0, 16):
                yield lanes.nibble_level(table, word, first + half)


def nibble_pairs(lanes: Lanes, words: list[Any], table: tuple[float, ...]) -> Iterator[Any]:
    """Emits table[code] for each nibble, as pairs of bfloat16; the table's values must be exact in
    bfloat16."""
    for word in words:
        for first in NIBBLE_PAIRS:
            yield lanes.table_pair(table, word, first)


def nibble_integers(lanes: Lanes, words: list[Any]) -> Iterator[Any]:
    """Emits each nibble, as pairs of int16 in the order of `nibble_pairs`."""
    for word in words:
        for first in NIBBLE_PAIRS:
            yield lanes.both_bits(word, first, 4)
