"""FP8 weights with scales for blocks, channels, or the whole tensor.

W[n, k] = float8(n, k) * scale of the tile that (n, k) lies in. Micikevicius et al., "FP8 Formats
for Deep Learning", arXiv:2209.05433; tiles of 128 x 128 after DeepSeek-V3, arXiv:2412.19437.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from specexec_kernels.formats.base import Part, RowFormat

if TYPE_CHECKING:
    from specexec_kernels.cpu_rows_ir import Lanes


@dataclass(frozen=True, slots=True)
class Fp8(RowFormat):
    """float8 with one scale per tile."""

    name: ClassVar[str] = "FP8"
    has_scale: ClassVar[bool] = True
    unit: int
    kind: str  # safetensors' name of the dtype
    scale: str  # leaf of the scales
    scale_dtype: str
    tile: tuple[int, int]  # outputs and inputs of a tile; 0: all

    @property
    def parts(self) -> tuple[Part, ...]:
        return (
            Part("weight", self.kind),
            Part(self.scale, self.scale_dtype, outputs=self.tile[0], inputs=self.tile[1]),
        )

    def unpack(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        scale = tensors[self.scale].float()
        wide = scale.repeat_interleave(self.tile[0] or outputs, 0)[:outputs]
        wide = wide.repeat_interleave(self.tile[1] or inputs, 1)[:, :inputs]
        return tensors["weight"].float() * wide

    @property
    def block(self) -> int:
        return self.tile[1] if 0 < self.tile[1] <= 256 else max(self.unit, 128)

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        return lanes.item(self.scale), None

    @property
    def order(self) -> tuple[int, ...]:
        # bytes 0 and 2 of a word are a pair of halves, and so are 1 and 3
        return tuple(4 * word + byte for word in range(self.unit // 4) for byte in (0, 2, 1, 3))

    def values(self, lanes: Lanes) -> Iterator[Any]:
        for word in lanes.read_words("weight"):
            for byte in (0, 2, 1, 3):
                yield lanes.float8(lanes.byte(word, byte), self.kind)
