"""A linear whose weight stays packed: GPTQ and AWQ as they are on disk.

The packed tensors are parameters of the module, so they stream like any other weight, and are
unpacked where they are multiplied (specexec_kernels).
"""

from __future__ import annotations

from typing import cast

import torch
from specexec_kernels import dispatch
from specexec_kernels.packing import PackedFormat, PackedWeight
from torch import Tensor, nn


class QuantizedLinear(nn.Module):
    """nn.Linear over a packed weight; see PackedWeight for the tensors."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        fmt: PackedFormat,
        group_size: int,
        *,
        bias: bool,
        shuffled: bool,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.format, self.group_size = fmt, group_size
        groups = -(-in_features // group_size)
        words = out_features * fmt.bits // 32
        packed = (in_features, words) if fmt.awq else (in_features * fmt.bits // 32, out_features)
        self.qweight = _meta(packed, torch.int32)
        self.qzeros = _meta((groups, words), torch.int32)
        self.scales = _meta((groups, out_features), torch.float16)
        self.g_idx = _meta((in_features,), torch.int32) if shuffled else None
        self.bias = _meta((out_features,), torch.float16) if bias else None

    def forward(self, rows: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), in the dtype of `rows`."""
        return self._product(rows, rows.dtype)

    def wide(self, rows: Tensor) -> Tensor:
        """(..., in_features) in two bytes, on a GPU -> (..., out_features) float32, as summed."""
        return self._product(rows, torch.float32)

    def _product(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        flat = rows.reshape(-1, self.in_features)
        output = dispatch.quantized_matmul(flat, self.stored_weight(), dtype)
        if self.bias is not None:
            output += self.bias.to(output.dtype)
        return output.view(*rows.shape[:-1], self.out_features)

    def stored_weight(self) -> PackedWeight:
        """The tensors that are bound to this module now."""
        bound = self._parameters  # without nn.Module's search for names
        return PackedWeight(
            format=self.format,
            in_features=self.in_features,
            out_features=self.out_features,
            group_size=self.group_size,
            qweight=cast(Tensor, bound["qweight"]),
            qzeros=cast(Tensor, bound["qzeros"]),
            scales=cast(Tensor, bound["scales"]),
            g_idx=bound.get("g_idx"),
        )


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
