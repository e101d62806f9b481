"""MXFP4 and NVFP4: 4-bit floats (E2M1) with one scale for each 32 or 16 inputs of an output.

MXFP4 (OCP Microscaling Formats 1.0, 2023): the scale is a power of two, E8M0. NVFP4: the scale is
an E4M3 float, and the tensor has one float32 factor for all scales, by which modelopt multiplies
and compressed-tensors divides. The lower nibble of a byte is the earlier input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from specexec_kernels.formats.base import PackedFormat, Part, TritonForm

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Fp4(PackedFormat):
    """E2M1 floats with a scale for each group of inputs."""

    name: ClassVar[str] = "FP4"
    has_scale: ClassVar[bool] = True
    unit: int  # a multiple of the group
    group: int  # inputs of a group
    codes: str = "weight_packed"  # leaf of the codes
    scales: str = "weight_scale"  # leaf of the scales
    scale_dtype: str = "U8"  # U8 for E8M0, or F8_E4M3
    factor: str = ""  # leaf of the float32 factor; empty where there is none
    divides: bool = False  # whether scales are divided by the factor

    @property
    def parts(self) -> tuple[Part, ...]:
        parts = [
            Part(self.codes, "U8", inputs=2),
            Part(self.scales, self.scale_dtype, inputs=self.group),
        ]
        if self.factor:
            parts.append(Part(self.factor, "F32", outputs=0, inputs=0))
        return tuple(parts)

    @property
    def block(self) -> int:
        return self.group

    @property
    def order(self) -> tuple[int, ...]:
        # nibbles i and i + 4 of a word are a pair: the same bits of its two halves
        return tuple(8 * word + i + half for word in range(self.unit // 8) for i in range(4)
                     for half in (0, 4))  # fmt: skip

    def unpack(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        packed = tensors[self.codes].view(torch.uint8)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(outputs, -1)
        stored = tensors[self.scales]
        if self.scale_dtype == "U8":
            stored = stored.view(torch.float8_e8m0fnu)
        scales = stored.float()
        if self.factor:
            factor = tensors[self.factor]
            scales = scales / factor if self.divides else scales * factor
        table = torch.tensor(E2M1, device=packed.device)
        return table[codes.long()] * scales.repeat_interleave(self.group, 1)

    def values(self, lanes: Lanes) -> Iterator[Any]:
        for word in lanes.read_words(self.codes):
            for i in range(4):
                for number in (i, i + 4):
                    yield lanes.table(E2M1, lanes.nibble(word, number))

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        for word in lanes.read_words(self.codes):
            for i in range(4):
                yield lanes.table_pair(E2M1, word, 4 * i)

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        scale = lanes.item(self.scales, number)
        if self.scale_dtype == "U8":
            scale = lanes.power_of_two(scale)
        if self.factor:
            factor = lanes.item(self.factor)
            scale = lanes.b.fdiv(scale, factor) if self.divides else lanes.b.fmul(scale, factor)
        return scale, None

    def triton(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        factor = ("/" if self.divides else "*") if self.factor else ""
        return TritonForm(triton_tiles.fp4, (self.group, self.scale_dtype, factor))
