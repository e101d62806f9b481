"""FP8 weights with scales for blocks, channels, or the whole tensor.

W[n, k] = float8(n, k) * (scale of the tile that (n, k) lies in). Scales are plain floats, or powers
of two in a byte (transformers' `scale_fmt` ue8m0).

Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433; tiles of 128 x 128
as in DeepSeek-V3, arXiv:2412.19437.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

from torch import Tensor

from specexec_kernels.formats import register
from specexec_kernels.formats.base import (
    CACHE_SCALES,
    SCALES,
    Method,
    PackedFormat,
    Part,
    Stored,
    TritonForm,
    block_of,
)

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes


@dataclass(frozen=True, slots=True)
class Fp8(PackedFormat):
    """float8 codes with one scale per tile."""

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
        return block_of(self.tile[1], self.unit)

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        return lanes.item(self.scale, number), None

    @property
    def order(self) -> tuple[int, ...]:
        # bytes 0 and 2 of a word are a pair, since they are the same bits of its two halves, and
        # so are bytes 1 and 3
        return tuple(4 * word + byte for word in range(self.unit // 4) for byte in (0, 2, 1, 3))

    def values(self, lanes: Lanes) -> Iterator[Any]:
        for word in lanes.read_words("weight"):
            for byte in (0, 2, 1, 3):
                yield lanes.float8(lanes.byte(word, byte), self.kind)

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        if self.kind != "F8_E4M3" or not lanes.has_byte_tables:
            yield from PackedFormat.pairs(self, lanes)
            return
        for word in lanes.read_words("weight"):
            yield from lanes.float8_pairs(word)

    def triton(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        return TritonForm(triton_tiles.fp8, (self.kind == "F8_E4M3", *self.tile, self.scale_dtype))


KINDS = ("F8_E4M3", "F8_E5M2")


def read_fp8(stored: Stored, settings: Mapping[str, Any]) -> Fp8 | None:
    """The format of a float8 linear with a tensor of scales; None where it is not float8.

    Args:
        stored: the linear's tensors.
        settings: has `weight_block_size` where scales are for tiles.
    Raises:
        ValueError: the scales have a shape that the settings do not explain, or another dtype.
    """
    if stored.dtype("weight") not in KINDS:
        return None
    leaf = "weight_scale_inv" if "weight_scale_inv" in stored.tensors else "weight_scale"
    sizes = [size for size in stored.shape(leaf) if size != 1]
    block = settings.get("weight_block_size")
    if not sizes:
        tile: tuple[int, int] = 0, 0
    elif block is None and sizes == [stored.outputs]:
        tile = 1, 0
    elif _is_block(block):
        tile = block[0], block[1]
    else:
        raise ValueError(
            f"scales of shape {list(stored.shape(leaf))} need a weight_block_size of two whole "
            f"numbers, not {block!r}"
        )
    unit = stored.unit_of(tile[1], 16, 4)
    return Fp8(unit, stored.dtype("weight"), leaf, stored.dtype(leaf, *SCALES, "F8_E8M0"), tile)


def _is_block(block: Any) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(type(size) is int and size > 0 and size % 4 == 0 for size in block)
    )


# fp8 is transformers' name of DeepSeek-V3's layout; fbgemm_fp8 has scales for channels.
METHOD = Method(
    name="fp8",
    leaves=("weight", "weight_scale_inv", "weight_scale"),
    unused=("input_scale", "activation_scale", "input_scale_ub", *CACHE_SCALES),
    read=read_fp8,
    quantizes_rows=lambda settings: True,
)
FBGEMM = Method(
    name="fbgemm_fp8",
    leaves=METHOD.leaves,
    unused=METHOD.unused,
    read=read_fp8,
    quantizes_rows=METHOD.quantizes_rows,
)
register(METHOD)
register(FBGEMM)
