"""AWQ's GEMM format: 4 bits with a scale and a zero point for each output and group of inputs.

W[n, k] = scales[g, n] * (code[k, n] - zero[g, n]) with g = k // group. As in GPTQ, rows are inputs
or groups and columns are outputs, but both codes and zero points are packed along the outputs:
nibble i of word c holds output 8 * c + AWQ_ORDER[i].

Source: Lin et al., arXiv:2306.00978; the layout is that of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from specexec_kernels.formats.base import PackedFormat, Part, TritonForm
from specexec_kernels.formats.gptq import Gptq, shared_run
from specexec_kernels.packing import awq_to_rows, store_zeros, unpack_awq

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes

_BITS, _MIDDLE = 4, 8
_LONGEST_BLOCK = 64  # inputs, one line in memory each; see cpu_matmul_spec.TILE_LINES


@dataclass(frozen=True, slots=True)
class Awq(PackedFormat):
    """4-bit codes, packed along the outputs."""

    name: ClassVar[str] = "AWQ"
    bits: ClassVar[int] = 4
    code_bits: ClassVar[int] = 4
    has_scale: ClassVar[bool] = True
    has_offset: ClassVar[bool] = True
    group: int  # inputs of a group; 0: all
    scale_dtype: str = "F16"
    unit: int = 8  # each of its inputs has a line of words

    @property
    def compiled(self) -> bool:  # type: ignore[override]
        """False where the inputs of a unit belong to several groups."""
        return self.group % self.unit == 0

    @property
    def block(self) -> int:
        return min(shared_run(self.group), _LONGEST_BLOCK)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (
            Part("qweight", "I32", row_items=_BITS, outputs=32, down=True),
            Part("qzeros", "I32", row_items=_BITS, outputs=32, inputs=self.group, down=True),
            Part("scales", self.scale_dtype, inputs=self.group, down=True),
        )

    def unpack(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        codes, zeros = unpack_awq(tensors["qweight"]), unpack_awq(tensors["qzeros"])
        group = torch.arange(inputs, device=codes.device) // (self.group or inputs)
        return (tensors["scales"].float()[group] * (codes - zeros[group]).float()).T.contiguous()

    def values(self, lanes: Lanes) -> Iterator[Any]:
        for place in range(self.unit):
            yield lanes.less(self._codes(lanes, "qweight", lanes.input_at(place)), _MIDDLE)

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        table = tuple(float(code - _MIDDLE) for code in range(16))
        for place in range(0, self.unit, 2):
            first, second = (lanes.input_at(at) for at in (place, place + 1))
            yield lanes.table_pair(table, lanes.pairs_along("qweight", (first, second)), 0)

    @property
    def zero(self) -> int:  # type: ignore[override]
        """The code in the middle; the groups' zero points are in their offsets."""
        return _MIDDLE

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        for place in range(0, self.unit, 2):
            first, second = (lanes.input_at(at) for at in (place, place + 1))
            yield lanes.both_bits(lanes.pairs_along("qweight", (first, second)), 0, _BITS)

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        scale = lanes.item("scales", number)
        zeros = self._codes(lanes, "qzeros", lanes.column("qzeros", number))
        return scale, lanes.b.fmul(scale, lanes.to_float(lanes.b.sub(lanes.same(_MIDDLE), zeros)))

    @staticmethod
    def _codes(lanes: Lanes, leaf: str, line: Any) -> Any:
        return lanes.codes_along(leaf, line, _BITS, interleaved=True)

    def triton(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        return TritonForm(triton_tiles.awq, (self.group,), step=128)

    def staying(self, inputs: int) -> Gptq | None:
        if inputs % 8 or self.group % 8:
            return None
        return Gptq(_BITS, self.group, self.scale_dtype)

    def rearrange(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            "qweight": awq_to_rows(tensors["qweight"]),
            "qzeros": store_zeros(unpack_awq(tensors["qzeros"]), _BITS),
            "scales": tensors["scales"],
        }
