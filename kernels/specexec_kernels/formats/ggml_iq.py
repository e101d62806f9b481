"""GGUF's formats of codebooks, IQ1_S to IQ3_S: 4 or 8 weights are a row of a grid of all files.

A block has 256 weights; a row's number has 8 to 11 bits, and its signs are stored apart. The grids
are those of ggml-common.h (ggml-org/llama.cpp, pull requests 4773 to 5676); iq_grids.npz has them
as small whole numbers. There is no kernel that looks rows up: weights are unpacked where they are
multiplied, in slabs that change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from specexec_kernels.formats.ggml import GgmlFormat, halves

_DELTA = 0.125  # by which all weights of a group of IQ1 lie above or below their grid


@cache
def grid(name: str) -> Tensor:
    """(rows, 4 or 8) float32: the rows that a format's numbers stand for."""
    with np.load(Path(__file__).with_name("iq_grids.npz"), allow_pickle=False) as grids:
        return torch.from_numpy(grids[name].astype(np.float32))


def _numbers(blocks: Tensor, width: int) -> Tensor:
    """(blocks, bytes) uint8 -> (blocks, bytes // width) int64: numbers of `width` bytes each."""
    parts = blocks.long().view(len(blocks), -1, width)
    return (parts << (8 * torch.arange(width, device=blocks.device))).sum(-1)


def _bits(numbers: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """(blocks, n) int64 -> (blocks, n * shifts) int64: the fields at `shifts` of each number."""
    each = numbers[..., None] >> torch.tensor(shifts, device=numbers.device)
    return (each & mask).flatten(1)


def _signs(numbers: Tensor) -> Tensor:
    """(blocks, n) int64 bytes -> (blocks, 8 n) float32: -1 where a bit is set, lowest first."""
    return 1.0 - 2.0 * _bits(numbers, tuple(range(8)), 1).float()


def _even(numbers: Tensor) -> Tensor:
    """Bytes whose eighth bit makes the number of bits even, from the 7 bits that are stored."""
    odd = _bits(numbers, tuple(range(7)), 1).view(*numbers.shape, 7).sum(-1) & 1
    return numbers | (odd << 7)


_SEVENS = (0, 7, 14, 21)


@dataclass(frozen=True, slots=True)
class _Codebook(GgmlFormat):
    compiled: ClassVar[bool] = False
    has_scale: ClassVar[bool] = True
    group: ClassVar[int] = 32
    codebook: ClassVar[str] = ""  # the format that has the grid, if another
    unit: int = 256

    def rows(self, numbers: Tensor) -> Tensor:
        """(blocks, n) numbers of rows -> (blocks, 256) float32."""
        return grid(self.codebook or self.name).to(numbers.device)[numbers].flatten(1)


@dataclass(frozen=True, slots=True)
class IQ2_XXS(_Codebook):
    """Rows of 8 bits; a word for 32 weights has their signs, 7 of every 8, and a scale."""

    name: ClassVar[str] = "IQ2_XXS"
    block_bytes: ClassVar[int] = 66

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        each = blocks[:, 2:].reshape(len(blocks), 8, 8)
        words = _numbers(each[..., 4:].flatten(1), 4)
        scale = halves(blocks, 0) * (0.5 + (words >> 28).float()) * 0.25
        signs = _signs(_even(_bits(words, _SEVENS, 127)))
        return scale, None, self.rows(each[..., :4].flatten(1).long()) * signs


@dataclass(frozen=True, slots=True)
class IQ2_XS(_Codebook):
    """Rows of 9 bits, in two bytes with 7 signs; a scale of 4 bits for 16 weights."""

    name: ClassVar[str] = "IQ2_XS"
    block_bytes: ClassVar[int] = 74
    group: ClassVar[int] = 16

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        codes = _numbers(blocks[:, 2:66], 2)
        scale = _quarters(blocks, blocks[:, 66:])
        return scale, None, self.rows(codes & 511) * _signs(_even(codes >> 9))


@dataclass(frozen=True, slots=True)
class IQ2_S(_Codebook):
    """Rows of 10 bits, of which two are stored apart, as are all signs."""

    name: ClassVar[str] = "IQ2_S"
    block_bytes: ClassVar[int] = 82
    group: ClassVar[int] = 16

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        high = _bits(blocks[:, 66:74].long(), (0, 2, 4, 6), 3)
        signs = _signs(blocks[:, 34:66].long())
        scale = _quarters(blocks, blocks[:, 74:])
        return scale, None, self.rows(blocks[:, 2:34].long() | (high << 8)) * signs


def _quarters(blocks: Tensor, nibbles: Tensor) -> Tensor:
    """Scales of 4 bits each: a quarter of the block's for each step, and a half step more."""
    return halves(blocks, 0) * (0.5 + _bits(nibbles.long(), (0, 4), 15).float()) * 0.25


@dataclass(frozen=True, slots=True)
class IQ3_XXS(_Codebook):
    """Rows of four weights in 8 bits; signs and scales as in IQ2_XXS."""

    name: ClassVar[str] = "IQ3_XXS"
    block_bytes: ClassVar[int] = 98

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        words = _numbers(blocks[:, 66:], 4)
        scale = halves(blocks, 0) * (0.5 + (words >> 28).float()) * 0.5
        signs = _signs(_even(_bits(words, _SEVENS, 127)))
        return scale, None, self.rows(blocks[:, 2:66].long()) * signs


@dataclass(frozen=True, slots=True)
class IQ3_S(_Codebook):
    """Rows of four weights in 9 bits, the ninth and all signs apart; scales of 4 bits."""

    name: ClassVar[str] = "IQ3_S"
    block_bytes: ClassVar[int] = 110

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        high = _bits(blocks[:, 66:74].long(), tuple(range(8)), 1)
        signs = _signs(blocks[:, 74:106].long())
        steps = _bits(blocks[:, 106:].long(), (0, 4), 15)
        scale = halves(blocks, 0) * (1 + 2 * steps).float()
        return scale, None, self.rows(blocks[:, 2:66].long() | (high << 8)) * signs


@dataclass(frozen=True, slots=True)
class IQ1_S(_Codebook):
    """Rows of -1, 0 and 1 in 11 bits; two bytes for 32 weights have the upper three, a scale of
    three bits, and the sign of the shift."""

    name: ClassVar[str] = "IQ1_S"
    block_bytes: ClassVar[int] = 50

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        upper = _numbers(blocks[:, 34:], 2)
        scale = halves(blocks, 0) * (2 * ((upper >> 12) & 7) + 1).float()
        rows = self.rows(blocks[:, 2:34].long() | (_bits(upper, (0, 3, 6, 9), 7) << 8))
        shift = _DELTA * (1.0 - 2.0 * (upper >> 15).float())
        return scale, None, rows + shift.repeat_interleave(32, dim=1)


@dataclass(frozen=True, slots=True)
class IQ1_M(_Codebook):
    """As IQ1_S, with scales for 16 weights and shifts for 8; the block's own scale lies in the
    upper four bits of four numbers."""

    name: ClassVar[str] = "IQ1_M"
    codebook: ClassVar[str] = "IQ1_S"
    block_bytes: ClassVar[int] = 56
    group: ClassVar[int] = 16

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        numbers = _numbers(blocks[:, 48:], 2)
        places = 4 * torch.arange(4, device=blocks.device)
        factor = ((numbers >> 12) << places).sum(-1, keepdim=True).to(torch.int32)
        both = torch.stack((factor & 255, factor >> 8), dim=-1).to(torch.uint8).view(-1, 2)
        scale = halves(both, 0) * (2 * _bits(numbers, (0, 3, 6, 9), 7) + 1).float()
        upper = _bits(blocks[:, 32:48].long(), (0, 4), 15)
        rows = self.rows(blocks[:, :32].long() | ((upper & 7) << 8))
        shift = _DELTA * (1.0 - 2.0 * (upper >> 3).float())
        return scale, None, rows + shift.repeat_interleave(8, dim=1)
