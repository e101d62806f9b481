"""GGUF's formats of 32 weights to a block: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL and MXFP4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from specexec_kernels.formats.base import TritonForm, byte_order
from specexec_kernels.formats.ggml import (
    GgmlFormat,
    halves,
    nibble_integers,
    nibble_order,
    nibble_pairs,
    nibble_values,
    nibbles,
)

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes

PAIRED_BYTES = (0, 2, 1, 3)  # of a word, as `nibble_order` has them
# from ggml-common.h: `kvalues_iq4nl`, and `kvalues_mxfp4`, which are twice the values of E2M1
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class _Of32(GgmlFormat):
    """32 codes after a float16 scale, and perhaps a float16 offset."""

    has_scale: ClassVar[bool] = True
    group: ClassVar[int] = 32
    unit: int = 32

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        offset = lanes.half(lanes.read_halfword("weight", 2)) if self.has_offset else None
        return lanes.half(lanes.read_halfword("weight", 0)), offset


@dataclass(frozen=True, slots=True)
class _Nibbles(_Of32):
    """4-bit codes, each the index of a value in a table."""

    code_bits: ClassVar[int] = 4
    codes_at: ClassVar[int] = 2  # byte of the block where the codes begin
    table: ClassVar[tuple[float, ...]]  # 16 values

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        table = torch.tensor(self.table, dtype=torch.float32, device=blocks.device)
        levels = table[nibbles(blocks[:, self.codes_at :]).long()]
        return halves(blocks, 0), halves(blocks, 2) if self.has_offset else None, levels

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(nibble_order(1, 16))

    def values(self, lanes: Lanes) -> Iterator[Any]:
        words = lanes.read_words("weight", self.codes_at, 4)
        return nibble_values(lanes, words, self.table)

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        words = lanes.read_words("weight", self.codes_at, 4)
        return nibble_pairs(lanes, words, self.table)


@dataclass(frozen=True, slots=True)
class Q4_0(_Nibbles):
    """4-bit codes; code 8 stands for 0."""

    name: ClassVar[str] = "Q4_0"
    block_bytes: ClassVar[int] = 18
    pieces: ClassVar[tuple[tuple[int, int], ...]] = ((2, 18), (0, 2))
    table: ClassVar[tuple[float, ...]] = tuple(range(-8, 8))
    zero: ClassVar[int | None] = 8

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        return nibble_integers(lanes, lanes.read_words("weight", self.codes_at, 4))

    def triton(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        return TritonForm(triton_tiles.q4_0)

    def apart(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        return TritonForm(triton_tiles.q4_0_apart)


@dataclass(frozen=True, slots=True)
class Q4_1(_Nibbles):
    """4-bit codes; code 0 stands for the block's minimum."""

    name: ClassVar[str] = "Q4_1"
    has_offset: ClassVar[bool] = True
    block_bytes: ClassVar[int] = 20
    codes_at: ClassVar[int] = 4
    table: ClassVar[tuple[float, ...]] = tuple(range(16))
    zero: ClassVar[int | None] = 0

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        return nibble_integers(lanes, lanes.read_words("weight", self.codes_at, 4))


@dataclass(frozen=True, slots=True)
class IQ4_NL(_Nibbles):
    """4-bit codes of levels that lie closer together around zero."""

    name: ClassVar[str] = "IQ4_NL"
    block_bytes: ClassVar[int] = 18
    table: ClassVar[tuple[float, ...]] = IQ4_LEVELS


@dataclass(frozen=True, slots=True)
class MXFP4(_Nibbles):
    """E2M1 floats with a power of two as scale (OCP Microscaling Formats 1.0).

    As in llama.cpp the table has twice the floats' values, and the scale is half as large.
    """

    name: ClassVar[str] = "MXFP4"
    block_bytes: ClassVar[int] = 17
    codes_at: ClassVar[int] = 1
    table: ClassVar[tuple[float, ...]] = E2M1_TWICE

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        exponent = blocks[:, :1].int()
        # half of 2 ** (code - 127), which is denormal for the codes 0 and 1
        bits = torch.where(exponent < 2, (1 << 21) << exponent, (exponent - 1) << 23)
        table = torch.tensor(self.table, dtype=torch.float32, device=blocks.device)
        return bits.view(torch.float32), None, table[nibbles(blocks[:, 1:]).long()]

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        b, code = lanes.b, lanes.read_byte("weight", 0)
        normal = b.shl(b.sub(code, lanes.same(1)), lanes.same(23))
        denormal = b.shl(lanes.same(1 << 21), code)
        is_denormal = b.icmp_signed("<", code, lanes.same(2))
        return b.bitcast(b.select(is_denormal, denormal, normal), lanes.vector), None


@dataclass(frozen=True, slots=True)
class _Fifths(_Of32):
    """5-bit codes; a word in front of the lower 4 bits has the highest bits of all 32 codes."""

    code_bits: ClassVar[int] = 5
    codes_at: ClassVar[int]  # byte of the block where the lower 4 bits begin
    least: ClassVar[int]  # the level of code 0

    def codes(self, blocks: Tensor) -> Tensor:
        """The codes of blocks (blocks, bytes), (blocks, 32) from 0 to 31."""
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
        high = (blocks[:, self.codes_at - 4 : self.codes_at, None] >> shifts) & 1
        return nibbles(blocks[:, self.codes_at :]) | (high.reshape(-1, 32) << 4)

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(nibble_order(1, 16))

    def quads(self, lanes: Lanes) -> Iterator[Any]:
        high, *words = lanes.read_words("weight", self.codes_at - 4, 5)
        for number, word in enumerate(words):
            for half in (0, 1):
                low = lanes.b.lshr(word, lanes.same(4)) if half else word
                low = lanes.b.and_(low, lanes.same(0x0F0F0F0F))
                yield lanes.b.or_(low, lanes.bit_of_each_byte(high, 4 * number + 16 * half, 4))

    def values(self, lanes: Lanes) -> Iterator[Any]:
        for codes in self.quads(lanes):
            for byte in PAIRED_BYTES:
                code = lanes.b.add(lanes.byte(codes, byte), lanes.same(self.least))
                yield lanes.to_float(code)

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        levels = tuple(float(code + self.least) for code in range(32))
        for codes in self.integers(lanes):
            yield lanes.table_pair(levels, codes, 0)

    @property
    def zero(self) -> int:  # type: ignore[override]
        """The code of level 0."""
        return -self.least

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        for codes in self.quads(lanes):
            for byte in (0, 1):
                yield lanes.both_bits(codes, 8 * byte, 8)


@dataclass(frozen=True, slots=True)
class Q5_0(_Fifths):
    """5-bit codes; code 16 stands for 0."""

    name: ClassVar[str] = "Q5_0"
    block_bytes: ClassVar[int] = 22
    codes_at: ClassVar[int] = 6
    least: ClassVar[int] = -16

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        return halves(blocks, 0), None, self.codes(blocks).float() + self.least


@dataclass(frozen=True, slots=True)
class Q5_1(_Fifths):
    """5-bit codes; code 0 stands for the block's minimum."""

    name: ClassVar[str] = "Q5_1"
    has_offset: ClassVar[bool] = True
    block_bytes: ClassVar[int] = 24
    codes_at: ClassVar[int] = 8
    least: ClassVar[int] = 0

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        return halves(blocks, 0), halves(blocks, 2), self.codes(blocks).float()


@dataclass(frozen=True, slots=True)
class Q8_0(_Of32):
    """8-bit codes, signed."""

    name: ClassVar[str] = "Q8_0"
    block_bytes: ClassVar[int] = 34
    pieces: ClassVar[tuple[tuple[int, int], ...]] = ((2, 34), (0, 2))
    zero: ClassVar[int | None] = 0

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        return halves(blocks, 0), None, blocks[:, 2:].contiguous().view(torch.int8).float()

    def values(self, lanes: Lanes) -> Iterator[Any]:
        for word in lanes.read_words("weight", 2, 8):
            for byte in range(4):
                yield lanes.to_float(lanes.signed_byte(word, byte))

    @property
    def integer_order(self) -> tuple[int, ...]:
        return byte_order(self.unit)

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        for word in lanes.read_words("weight", 2, 8):
            yield from lanes.signed_bytes(word)

    @property
    def quad_order(self) -> tuple[int, ...]:
        return tuple(range(self.unit))

    @property
    def quad_zero(self) -> int:
        return 128

    def quads(self, lanes: Lanes) -> Iterator[Any]:
        return lanes.unsigned_bytes(lanes.read_words("weight", 2, 8))

    def triton(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        return TritonForm(triton_tiles.q8_0)

    def apart(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        return TritonForm(triton_tiles.q8_0_apart, step=128)
