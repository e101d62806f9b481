"""Linears whose weight stays packed as it is on disk.

The packed tensors are parameters of the module, so they stream like any other weight, and are
unpacked where they are multiplied (specexec_kernels).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from specexec_kernels import dispatch
from specexec_kernels.formats.base import PackedFormat, PackedWeight
from torch import Tensor, nn


class QuantizedLinear(nn.Module):
    """nn.Linear over a packed weight, whose tensors are parameters."""

    bias: nn.Parameter | None
    block_rows: int | None = None  # see own_rows.py

    def __init__(
        self,
        in_features: int,
        out_features: int,
        fmt: PackedFormat,
        stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        *,
        bias: bool,
    ) -> None:
        """Over tensors of the shapes and dtypes that `stored` says, by leaf."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias = _meta((out_features,), torch.float16) if bias else None
        self.format = fmt
        self._names = {leaf: parameter_name(leaf) for leaf in stored}
        for leaf, (shape, dtype) in stored.items():
            self.register_parameter(self._names[leaf], _meta(shape, dtype))

    def forward(self, rows: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), in the dtype of `rows`."""
        return self._product(rows, rows.dtype)

    def wide(self, rows: Tensor) -> Tensor:
        """(..., in_features) in two bytes, on a GPU -> (..., out_features) float32, as summed."""
        return self._product(rows, torch.float32)

    def _product(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        flat = rows.reshape(-1, self.in_features)
        output = dispatch.quantized_matmul(flat, self.packed_weight(), dtype, self.block_rows)
        if self.bias is not None:
            output += self.bias.to(output.dtype)
        return output.view(*rows.shape[:-1], self.out_features)

    def stored_weight(self) -> PackedWeight:
        """As MixedLinear.stored_weight."""
        return self.packed_weight()

    def packed_weight(self) -> PackedWeight:
        """The tensors that are bound to this module now."""
        bound = self._parameters  # without nn.Module's search for names
        tensors = {leaf: cast(Tensor, bound[name]) for leaf, name in self._names.items()}
        return PackedWeight(self.format, self.in_features, self.out_features, tensors)


def parameter_name(leaf: str) -> str:
    """What the parameter of a leaf is called, in which PyTorch allows no dots."""
    return leaf.replace(".", "__")


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
