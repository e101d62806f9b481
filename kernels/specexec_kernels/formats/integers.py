"""Integers with a scale and perhaps a zero point for each output and group of inputs.

W[n, k] = scale * (code - zero). Codes of 1 to 8 bits are packed along the inputs into little-endian
words, with half their range added; codes of 8 bits may also be plain int8. Zero points are packed
in the same way, but along the outputs. The layouts are those of compressed-tensors' pack-quantized
and int-quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from specexec_kernels.formats.base import (
    PackedFormat,
    Part,
    TritonForm,
    block_of,
    byte_order,
    fits_units,
    has_halves,
)
from specexec_kernels.packing import unpack_rows

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes


_WORDS = (2, 3, 4, 8)  # bits of codes that Triton reads a word at a time


@dataclass(frozen=True, slots=True)
class PackedIntegers(PackedFormat):
    """Codes packed in words."""

    name: ClassVar[str] = "packed integers"
    has_scale: ClassVar[bool] = True
    bits: int
    group: int  # inputs of a group; 0: all
    scale_dtype: str
    zeros: bool  # whether there are zero points
    shuffled: bool = False  # whether `weight_g_idx` gives the group of each input
    unit: int = 32

    @property
    def has_offset(self) -> bool:  # type: ignore[override]
        """Whether there are zero points."""
        return self.zeros

    @property
    def index(self) -> tuple[str | None, int] | None:
        return ("weight_g_idx", self.group) if self.shuffled and self.group else None

    @property
    def compiled(self) -> bool:  # type: ignore[override]
        """False where zero points straddle words, a block's inputs cannot be summed half by half,
        or units do not fit the groups."""
        fits = 32 % self.bits == 0 and (self.shuffled or has_halves(self.block))
        whole = self.unit % 32 == 0 and fits_units(self.group, self.unit)
        return whole and (fits or not self.zeros)

    @property
    def parts(self) -> tuple[Part, ...]:
        parts = [
            Part("weight_packed", "I32", items=self.bits, inputs=32),
            Part("weight_scale", self.scale_dtype, inputs=self.group),
        ]
        if self.zeros:
            parts.append(
                Part("weight_zero_point", "I32", row_items=self.bits, outputs=32,
                     inputs=self.group)
            )  # fmt: skip
        if self.shuffled:
            parts.append(Part("weight_g_idx", "I32", outputs=0))
        return tuple(parts)

    def unpack(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        middle = 2 ** (self.bits - 1)
        codes = unpack_rows(tensors["weight_packed"].T, self.bits).T[:, :inputs]
        if self.shuffled:
            group = tensors["weight_g_idx"].long().reshape(-1)
        else:
            group = torch.arange(inputs, device=codes.device) // (self.group or inputs)
        zeros: Tensor | int = middle
        if self.zeros:
            zeros = unpack_rows(tensors["weight_zero_point"], self.bits)[:outputs][:, group]
        return tensors["weight_scale"].float()[:, group] * (codes - zeros).float()

    @property
    def block(self) -> int:
        # each addition waits for the one before; over 128 inputs that takes longer than unpacking
        if self.unit % 64 == 0 and self.group % self.unit == 0:
            return 64
        return block_of(self.group, self.unit)

    @property
    def order(self) -> tuple[int, ...]:
        if self.bits != 4:
            return tuple(range(self.unit))
        return tuple(8 * word + i + half for word in range(self.unit // 8) for i in range(4)
                     for half in (0, 4))  # fmt: skip

    def values(self, lanes: Lanes) -> Iterator[Any]:
        words = lanes.read_words("weight_packed")
        for code in self.order:
            word, shift = divmod(code * self.bits, 32)
            high = words[min(word + 1, len(words) - 1)]
            field = lanes.field(self.bits, words[word], high, [shift] * lanes.lanes)
            yield lanes.less(field, 2 ** (self.bits - 1))

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        if self.bits != 4:
            yield from PackedFormat.pairs(self, lanes)
            return
        for word in lanes.read_words("weight_packed"):
            for i in range(4):
                yield lanes.table_pair(tuple(float(code - 8) for code in range(16)), word, 4 * i)

    @property
    def code_bits(self) -> int:  # type: ignore[override]
        """See PackedFormat."""
        return self.bits

    @property
    def quad_step(self) -> int:  # type: ignore[override]
        """Codes of 4 bits that are a byte apart are joined by one masking."""
        return 2 if self.bits == 4 else 1

    @property
    def zero(self) -> int | None:  # type: ignore[override]
        """The code in the middle, of codes that lie alike in both halves of a word; the groups'
        zero points are in their offsets."""
        return 2 ** (self.bits - 1) if self.bits in (4, 8) else None

    @property
    def integer_order(self) -> tuple[int, ...]:
        return byte_order(self.unit) if self.bits == 8 else self.order

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        for word in lanes.read_words("weight_packed"):
            for first in range(0, 16, self.bits):
                yield lanes.both_bits(word, first, self.bits)

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        scale = lanes.item("weight_scale", number)
        if not self.zeros:
            return scale, None
        stored = lanes.column_bits(
            "weight_zero_point", self.bits, lanes.column("weight_zero_point", number)
        )
        zero = lanes.to_float(lanes.b.sub(stored, lanes.same(2 ** (self.bits - 1))))
        return scale, lanes.b.fneg(lanes.b.fmul(scale, zero))

    def triton(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        settings = self.bits, self.group, self.zeros, self.shuffled
        if self.bits not in _WORDS:
            return TritonForm(triton_tiles.integers, settings, rows=0)
        if self.shuffled or self.bits < 4:
            return TritonForm(triton_tiles.integers, settings, rows=64)
        return TritonForm(triton_tiles.integers, settings, step=128)


@dataclass(frozen=True, slots=True)
class Int8(PackedFormat):
    """int8 codes with one scale for each tile of outputs and inputs."""

    name: ClassVar[str] = "INT8"
    has_scale: ClassVar[bool] = True
    zero: ClassVar[int | None] = 0
    unit: int
    scale: str  # leaf of the scales
    scale_dtype: str
    tile: tuple[int, int]  # outputs and inputs of a scale; 0: all
    factor: float = 1.0  # multiplies every scale
    zeros: bool = False  # whether there are zero points, `weight_zero_point`, int8

    @property
    def has_offset(self) -> bool:  # type: ignore[override]
        """Whether there are zero points."""
        return self.zeros

    @property
    def compiled(self) -> bool:  # type: ignore[override]
        """False where units do not fit the groups, or a block's inputs cannot be summed half by
        half."""
        return fits_units(self.tile[1], self.unit) and (not self.zeros or has_halves(self.block))

    @property
    def parts(self) -> tuple[Part, ...]:
        outputs, inputs = self.tile
        parts = (
            Part("weight", "I8"),
            Part(self.scale, self.scale_dtype, outputs=outputs, inputs=inputs),
        )
        zeros = Part("weight_zero_point", "I8", outputs=outputs, inputs=inputs)
        return (*parts, zeros) if self.zeros else parts

    def unpack(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        def wide(stored: Tensor) -> Tensor:
            rows = stored.float().repeat_interleave(self.tile[0] or outputs, 0)[:outputs]
            return rows.repeat_interleave(self.tile[1] or inputs, 1)[:, :inputs]

        codes = tensors["weight"].float()
        if self.zeros:
            codes = codes - wide(tensors["weight_zero_point"])
        product = codes * wide(tensors[self.scale])
        return product if self.factor == 1.0 else product * self.factor

    @property
    def block(self) -> int:
        return block_of(self.tile[1], self.unit)

    def values(self, lanes: Lanes) -> Iterator[Any]:
        for word in lanes.read_words("weight"):
            for number in range(4):
                yield lanes.to_float(lanes.signed_byte(word, number))

    @property
    def integer_order(self) -> tuple[int, ...]:
        return byte_order(self.unit)

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        for word in lanes.read_words("weight"):
            yield from lanes.signed_bytes(word)

    @property
    def quad_order(self) -> tuple[int, ...]:
        return tuple(range(self.unit))

    @property
    def quad_zero(self) -> int:
        return 128

    def quads(self, lanes: Lanes) -> Iterator[Any]:
        return lanes.unsigned_bytes(lanes.read_words("weight"))

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        scale = lanes.item(self.scale, number)
        if self.factor != 1.0:
            scale = lanes.b.fmul(scale, lanes.constant(self.factor))
        if not self.zeros:
            return scale, None
        zero = lanes.to_float(lanes.signed_byte(lanes.item("weight_zero_point", number), 0))
        return scale, lanes.b.fneg(lanes.b.fmul(scale, zero))

    def triton(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        return TritonForm(triton_tiles.int8, (*self.tile, self.zeros, self.factor))
