"""GGUF's formats of 256 weights to a block, in groups with packed scales: Q2_K to Q6_K and IQ4_XS.

Source: ggml-org/llama.cpp pull request 1684 ("k-quants").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from specexec_kernels.formats.base import TritonForm
from specexec_kernels.formats.ggml import (
    GgmlFormat,
    fields,
    halves,
    nibble_order,
    nibble_pairs,
    nibble_values,
)
from specexec_kernels.formats.ggml_32 import IQ4_LEVELS

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes

_CODES = tuple(float(code) for code in range(32))
_SIGNED = tuple(float(code) for code in range(-32, 32))
# The bytes of a word in the order in which codes are yielded: the same bits of a word's two halves
# are a pair, so that bytes 0 and 2 are one, and bytes 1 and 3 the next.
_BYTES = (0, 2, 1, 3)


@dataclass(frozen=True, slots=True)
class _Of256(GgmlFormat):
    has_scale: ClassVar[bool] = True
    group: ClassVar[int] = 32
    unit: int = 256

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(4 * word + byte for word in range(64) for byte in _BYTES)


@dataclass(frozen=True, slots=True)
class _Quarters(_Of256):
    """Q2_K and Q3_K: groups of 16 codes, with 2 bits of each code four to a byte."""

    group: ClassVar[int] = 16
    codes_at: ClassVar[int]  # byte of the block where the codes begin

    def fields(self, lanes: Lanes, group: int) -> Iterator[tuple[Any, int, int]]:
        """Yields each word that has codes of a group: the word, its number in the group, and the
        bit of the first code in it."""
        half, quarter, part = group // 8, group % 8 // 2, group % 2
        at = self.codes_at + 32 * half + 16 * part
        words = lanes.once(at, lambda: lanes.read_words("weight", at, 4))
        for number, word in enumerate(words):
            yield word, number, 2 * quarter


@dataclass(frozen=True, slots=True)
class Q2_K(_Quarters):
    """2-bit codes; a group's scale and minimum have 4 bits each."""

    name: ClassVar[str] = "Q2_K"
    has_offset: ClassVar[bool] = True
    block_bytes: ClassVar[int] = 84
    zero: ClassVar[int | None] = 0
    code_bits: ClassVar[int] = 2
    codes_at: ClassVar[int] = 16

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        scales = blocks[:, :16]
        scale, minimum = halves(blocks, 80) * (scales & 15), halves(blocks, 82) * (scales >> 4)
        return scale, -minimum, fields(blocks[:, 16:80], 2, 2, 32).float()

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        b = lanes.b
        words = lanes.once("scales", lambda: lanes.read_words("weight", 0, 4))
        both = lanes.once("factors", lambda: lanes.read_words("weight", 80, 1)[0])
        scale, minimum = (
            lanes.to_float(lanes.nibble(words[number // 4], 2 * (number % 4) + high))
            for high in (0, 1)
        )
        least = b.fmul(lanes.half(b.lshr(both, lanes.same(16))), minimum)
        return b.fmul(lanes.half(both), scale), b.fneg(least)

    def values(self, lanes: Lanes) -> Iterator[Any]:
        for group in range(16):
            for word, _, bit in self.fields(lanes, group):
                for byte in _BYTES:
                    yield lanes.to_float(lanes.bits(word, 8 * byte + bit, 2))

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        # the table is chosen from by 4 bits; the upper two belong to another code
        table = tuple(float(code & 3) for code in range(16))
        for group in range(16):
            for word, _, bit in self.fields(lanes, group):
                for byte in (0, 1):
                    yield lanes.table_pair(table, word, 8 * byte + bit)

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        for group in range(16):
            for word, _, bit in self.fields(lanes, group):
                for byte in (0, 1):
                    yield lanes.both_bits(word, 8 * byte + bit, 2)


@dataclass(frozen=True, slots=True)
class Q3_K(_Quarters):
    """3-bit codes; code 4 stands for 0. The highest bits are stored apart."""

    name: ClassVar[str] = "Q3_K"
    block_bytes: ClassVar[int] = 110
    zero: ClassVar[int | None] = 4
    code_bits: ClassVar[int] = 3
    codes_at: ClassVar[int] = 32

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        low, high = fields(blocks[:, 96:104], 4, 4, 8), fields(blocks[:, 104:108], 2, 2, 4)
        scales = (low | (high << 4)).float() - 32
        missing = 1 - fields(blocks[:, :32], 1, 1, 32).float()
        levels = fields(blocks[:, 32:96], 2, 2, 32).float() - 4 * missing
        return halves(blocks, 108) * scales, None, levels

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        b, byte = lanes.b, 8 * (number % 4)
        words = lanes.once("scales", lambda: lanes.read_words("weight", 96, 3))
        factor = lanes.once("factor", lambda: lanes.half(lanes.read_halfword("weight", 108)))
        low = lanes.bits(words[number % 8 // 4], byte + 4 * (number // 8), 4)
        high = b.shl(lanes.bits(words[2], byte + 2 * (number // 4), 2), lanes.same(4))
        scale = lanes.to_float(b.sub(b.or_(low, high), lanes.same(32)))
        return b.fmul(factor, scale), None

    def highest(self, lanes: Lanes, group: int) -> list[Any]:
        """The words with the highest bits of a group's codes, at bit group // 2 of each byte."""
        at = 16 * (group % 2)
        return lanes.once(at, lambda: lanes.read_words("weight", at, 4))

    def values(self, lanes: Lanes) -> Iterator[Any]:
        b = lanes.b
        for group in range(16):
            highest = self.highest(lanes, group)
            for word, number, bit in self.fields(lanes, group):
                for byte in _BYTES:
                    upper = lanes.bits(highest[number], 8 * byte + group // 2, 1)
                    code = b.or_(lanes.bits(word, 8 * byte + bit, 2), b.shl(upper, lanes.same(2)))
                    yield lanes.to_float(b.sub(code, lanes.same(4)))

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        table = tuple(float((code & 7) - 4) for code in range(16))
        for codes in self.integers(lanes):
            yield lanes.table_pair(table, codes, 0)

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        b = lanes.b
        for group in range(16):
            highest = self.highest(lanes, group)
            for word, number, bit in self.fields(lanes, group):
                for byte in (0, 1):
                    low = lanes.both_bits(word, 8 * byte + bit, 2)
                    upper = lanes.both_bits(highest[number], 8 * byte + group // 2, 1)
                    yield b.or_(low, b.shl(upper, lanes.same(2)))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minima of Q4_K's and Q5_K's groups, (blocks, 8) float32 each.

    They have 6 bits each; the bits of the last four groups lie in two places.
    """
    low, middle, high = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=1)
    return halves(blocks, 0) * scales, halves(blocks, 2) * minima


@dataclass(frozen=True, slots=True)
class _ScalesAndMinima(_Of256):
    """What Q4_K and Q5_K share: 6-bit scales and minima, and the lower 4 bits of the codes."""

    has_offset: ClassVar[bool] = True
    zero: ClassVar[int | None] = 0
    codes_at: ClassVar[int]  # byte of the block where the codes' lower 4 bits begin

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        b = lanes.b
        both, *packed = lanes.once("scales", lambda: lanes.read_words("weight", 0, 4))
        first, second, third = (lanes.byte(word, number % 4) for word in packed)
        if number < 4:
            scale, minimum = (lanes.bits(code, 0, 6) for code in (first, second))
        else:
            upper = [b.shl(lanes.bits(code, 6, 2), lanes.same(4)) for code in (first, second)]
            scale = b.or_(lanes.bits(third, 0, 4), upper[0])
            minimum = b.or_(lanes.bits(third, 4, 4), upper[1])
        least = lanes.half(b.lshr(both, lanes.same(16)))
        least = b.fmul(least, lanes.to_float(minimum))
        return b.fmul(lanes.half(both), lanes.to_float(scale)), b.fneg(least)

    def words(self, lanes: Lanes, group: int) -> list[Any]:
        """The words with the lower 4 bits of a group's codes, and of its neighbour's."""
        at = self.codes_at + 32 * (group // 2)
        return lanes.once(at, lambda: lanes.read_words("weight", at, 8))


@dataclass(frozen=True, slots=True)
class Q4_K(_ScalesAndMinima):
    """4-bit codes; code 0 stands for the group's minimum."""

    name: ClassVar[str] = "Q4_K"
    block_bytes: ClassVar[int] = 144
    code_bits: ClassVar[int] = 4
    codes_at: ClassVar[int] = 16

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        scale, minimum = _scales_and_minima(blocks)
        return scale, -minimum, fields(blocks[:, 16:], 4, 4, 32).float()

    def values(self, lanes: Lanes) -> Iterator[Any]:
        for group in range(8):
            for word in self.words(lanes, group):
                for byte in _BYTES:
                    yield lanes.to_float(lanes.bits(word, 8 * byte + 4 * (group % 2), 4))

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        for group in range(8):
            for word in self.words(lanes, group):
                for byte in (0, 1):
                    yield lanes.table_pair(_CODES[:16], word, 8 * byte + 4 * (group % 2))

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        for group in range(8):
            for word in self.words(lanes, group):
                for byte in (0, 1):
                    yield lanes.both_bits(word, 8 * byte + 4 * (group % 2), 4)

    def triton(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        return TritonForm(triton_tiles.q4_k)


@dataclass(frozen=True, slots=True)
class Q5_K(_ScalesAndMinima):
    """5-bit codes; code 0 stands for the group's minimum. The highest bits are stored apart."""

    name: ClassVar[str] = "Q5_K"
    block_bytes: ClassVar[int] = 176
    code_bits: ClassVar[int] = 5
    codes_at: ClassVar[int] = 48

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        scale, minimum = _scales_and_minima(blocks)
        high = fields(blocks[:, 16:48], 1, 1, 32)
        return scale, -minimum, (fields(blocks[:, 48:], 4, 4, 32) | (high << 4)).float()

    def high(self, lanes: Lanes) -> list[Any]:
        """The words with the highest bits of all codes: bit g of each byte is group g's."""
        return lanes.once("high", lambda: lanes.read_words("weight", 16, 8))

    def values(self, lanes: Lanes) -> Iterator[Any]:
        b = lanes.b
        for group in range(8):
            for word, high in zip(self.words(lanes, group), self.high(lanes), strict=True):
                for byte in _BYTES:
                    low = lanes.bits(word, 8 * byte + 4 * (group % 2), 4)
                    upper = b.shl(lanes.bits(high, 8 * byte + group, 1), lanes.same(4))
                    yield lanes.to_float(b.or_(low, upper))

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        for codes in self.integers(lanes):
            yield lanes.table_pair(_CODES, codes, 0)

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        b = lanes.b
        for group in range(8):
            for word, high in zip(self.words(lanes, group), self.high(lanes), strict=True):
                for byte in (0, 1):
                    low = lanes.both_bits(word, 8 * byte + 4 * (group % 2), 4)
                    upper = b.shl(lanes.both_bits(high, 8 * byte + group, 1), lanes.same(4))
                    yield b.or_(low, upper)


@dataclass(frozen=True, slots=True)
class Q6_K(_Of256):
    """6-bit codes; code 32 stands for 0. The two highest bits are stored apart, and scales are
    signed bytes."""

    name: ClassVar[str] = "Q6_K"
    block_bytes: ClassVar[int] = 210
    pieces: ClassVar[tuple[tuple[int, int], ...]] = ((0, 128), (128, 192), (192, 208), (208, 210))
    zero: ClassVar[int | None] = 32
    code_bits: ClassVar[int] = 6
    group: ClassVar[int] = 16

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        scales = blocks[:, 192:208].contiguous().view(torch.int8)
        low, high = fields(blocks[:, :128], 4, 4, 64), fields(blocks[:, 128:192], 2, 2, 32)
        return halves(blocks, 208) * scales, None, (low | (high << 4)).float() - 32

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        words = lanes.once("scales", lambda: lanes.read_words("weight", 192, 4))
        factor = lanes.once("factor", lambda: lanes.half(lanes.read_halfword("weight", 208)))
        scale = lanes.to_float(lanes.signed_byte(words[number // 4], number % 4))
        return lanes.b.fmul(factor, scale), None

    def words(self, lanes: Lanes, group: int) -> Iterator[tuple[Any, Any, int, int]]:
        """Where a group's codes lie: (word of the lower 4 bits, word of the upper 2 bits, bit of
        the first code in each)."""
        half, quarter, part = group // 8, group % 8 // 2, group % 2
        low = 64 * half + 32 * (quarter % 2) + 16 * part
        high = 128 + 32 * half + 16 * part
        lows = lanes.once(low, lambda: lanes.read_words("weight", low, 4))
        highs = lanes.once(high, lambda: lanes.read_words("weight", high, 4))
        for low_word, high_word in zip(lows, highs, strict=True):
            yield low_word, high_word, 4 * (quarter // 2), 2 * quarter

    def values(self, lanes: Lanes) -> Iterator[Any]:
        b = lanes.b
        for group in range(16):
            for low_word, high_word, low_bit, high_bit in self.words(lanes, group):
                for byte in _BYTES:
                    low = lanes.bits(low_word, 8 * byte + low_bit, 4)
                    high = b.shl(lanes.bits(high_word, 8 * byte + high_bit, 2), lanes.same(4))
                    yield lanes.to_float(b.sub(b.or_(low, high), lanes.same(32)))

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        for codes in self.integers(lanes):
            yield lanes.wide_table_pair(_SIGNED, codes)

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        b = lanes.b
        for group in range(16):
            for low_word, high_word, low_bit, high_bit in self.words(lanes, group):
                for byte in (0, 1):
                    low = lanes.both_bits(low_word, 8 * byte + low_bit, 4)
                    high = b.shl(lanes.both_bits(high_word, 8 * byte + high_bit, 2), lanes.same(4))
                    yield b.or_(low, high)

    def triton(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        return TritonForm(triton_tiles.q6_k, (False,))

    def apart(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        return TritonForm(triton_tiles.q6_k, (True,))


@dataclass(frozen=True, slots=True)
class IQ4_XS(_Of256):
    """4-bit codes of IQ4_NL's levels, in groups with 6-bit scales."""

    name: ClassVar[str] = "IQ4_XS"
    block_bytes: ClassVar[int] = 136

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).reshape(-1, 8)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
        high = ((blocks[:, 2:4, None] >> shifts) & 3).reshape(-1, 8)
        levels = torch.tensor(IQ4_LEVELS, dtype=torch.float32, device=blocks.device)
        codes = fields(blocks[:, 8:], 4, 4, 16)
        return halves(blocks, 0) * ((low | (high << 4)).float() - 32), None, levels[codes.long()]

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(nibble_order(8, 16))

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        b = lanes.b
        first, low = lanes.once("scales", lambda: lanes.read_words("weight", 0, 2))
        high = b.shl(lanes.bits(first, 16 + 2 * number, 2), lanes.same(4))
        scale = b.sub(b.or_(lanes.nibble(low, number), high), lanes.same(32))
        return b.fmul(lanes.half(first), lanes.to_float(scale)), None

    def values(self, lanes: Lanes) -> Iterator[Any]:
        for at in range(8, 136, 16):
            yield from nibble_values(lanes, lanes.read_words("weight", at, 4), IQ4_LEVELS)

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        for at in range(8, 136, 16):
            yield from nibble_pairs(lanes, lanes.read_words("weight", at, 4), IQ4_LEVELS)
