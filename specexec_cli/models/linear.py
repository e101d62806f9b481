"""Linear layers that keep their weights in the file's dtype.

Weights are streamed in the checkpoint's dtype and computed in the session's. Each weight is rounded
to the dtype of the rows that it is multiplied by, so that it has the same value wherever it waits:
a layer that stays was converted when it was loaded. What float32 rows are multiplied by is exact in
its own dtype, and on a CPU kernels take it as it is (specexec_kernels.cpu_linear).
"""

from __future__ import annotations

from typing import cast

import torch
from specexec_kernels import cpu_linear
from specexec_kernels.cpu_half import Transposed
from specexec_kernels.row_blocks import in_row_blocks
from torch import Tensor, nn
from torch.nn import functional

_SLAB_WEIGHTS = 1 << 21  # that are rounded at once, before they are multiplied from the cache
_SLAB_OUTPUTS = 128  # a slab has a multiple of so many: whole strips of every kernel


def mixed_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, block_rows: int | None = None
) -> Tensor:
    """rows @ weight.T + bias, computed in the dtype of `rows`, to which both are rounded.

    Args:
        rows: (..., in_features) in the compute dtype.
        weight: (out_features, in_features) in any float dtype.
        bias: (out_features,) in any float dtype, or None.
        block_rows: on a GPU, rows of every product that PyTorch is asked for; see row_blocks.
    Returns:
        (..., out_features) in the compute dtype.
    """
    if bias is not None:
        bias = bias.to(rows.dtype)
    if _takes(rows.dtype, weight):
        out = _product(rows.reshape(-1, rows.shape[-1]), weight)
        if bias is not None:
            out += bias
        return out.to(rows.dtype).view(*rows.shape[:-1], weight.shape[0])
    weight = weight.to(rows.dtype)
    if block_rows is None or rows.device.type == "cpu":
        return functional.linear(rows, weight, bias)
    flat = rows.reshape(-1, rows.shape[-1])
    out = in_row_blocks(flat, block_rows, lambda own: functional.linear(own, weight, bias))
    return out.view(*rows.shape[:-1], weight.shape[0])


def _multiplied(rows: torch.dtype, stored: torch.dtype) -> torch.dtype:
    """The dtype of the values that rows are multiplied by."""
    exact = rows == torch.float32 and stored in (torch.bfloat16, torch.float16)
    return stored if exact else rows


def _takes(rows: torch.dtype, weight: Tensor) -> bool:
    """Whether the CPU kernels multiply rows of a dtype with a weight of any."""
    if weight.device.type != "cpu" or not weight.is_contiguous():
        return False
    return cpu_linear.takes(rows, weight.new_empty(0, dtype=_multiplied(rows, weight.dtype)))


def _rounded(weight: Tensor, rows: torch.dtype) -> Tensor:
    """The values that rows of a dtype are multiplied by."""
    dtype = _multiplied(rows, weight.dtype)
    if weight.dtype == torch.float16 and dtype == torch.bfloat16:
        weight = weight.float()  # exact, and PyTorch is slow at the direct way
    return weight.to(dtype)


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """(rows, inputs) times (outputs, inputs) that `_takes` accepts -> (rows, outputs) float32."""
    if weight.dtype == _multiplied(rows.dtype, weight.dtype):
        return cpu_linear.product(rows, weight)
    fitting = _SLAB_WEIGHTS // max(weight.shape[1], 1)
    slabs = torch.split(weight, max(fitting // _SLAB_OUTPUTS, 1) * _SLAB_OUTPUTS)
    return torch.cat([cpu_linear.product(rows, _rounded(slab, rows.dtype)) for slab in slabs], 1)


class MixedLinear(nn.Module):
    """nn.Linear whose weight may be of another dtype than its input."""

    block_rows: int | None = None  # see own_rows.py

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device="meta"), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, device="meta"), requires_grad=False)
            if bias
            else None
        )

    def forward(self, rows: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return mixed_linear(rows, self.weight, self.bias, self.block_rows)

    def stored_weight(self) -> Tensor | Transposed:
        """The weight that is bound to this module now."""
        return cast(Tensor, self._parameters["weight"])  # without nn.Module's search for names

    def wide(self, rows: Tensor) -> Tensor:
        """(..., in_features) in two bytes, on a GPU -> (..., out_features) float32, as summed."""
        flat = rows.reshape(-1, self.in_features)
        columns = self.weight.to(rows.dtype).t()

        def product(own: Tensor) -> Tensor:
            return torch.mm(own, columns, out_dtype=torch.float32)

        blocks = self.block_rows
        output = product(flat) if blocks is None else in_row_blocks(flat, blocks, product)
        if self.bias is not None:
            output += self.bias
        return output.view(*rows.shape[:-1], self.out_features)


class TransposedLinear(MixedLinear):
    """A linear whose weight is stored as (in_features, out_features)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.weight = nn.Parameter(
            torch.empty(in_features, out_features, device="meta"), requires_grad=False
        )

    def forward(self, rows: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if not _takes(rows.dtype, self.weight):
            return mixed_linear(rows, self.weight.t(), self.bias, self.block_rows)
        weight = _rounded(self.weight, rows.dtype)
        out = cpu_linear.transposed_product(rows.reshape(-1, self.in_features), weight)
        if self.bias is not None:
            out += self.bias.to(rows.dtype)
        return out.to(rows.dtype).view(*rows.shape[:-1], self.out_features)

    def stored_weight(self) -> Transposed:
        """The weight that is bound to this module now."""
        return Transposed(cast(Tensor, self._parameters["weight"]))

    def wide(self, rows: Tensor) -> Tensor:
        """(..., in_features) in two bytes, on a GPU -> (..., out_features) float32, as summed."""
        raise NotImplementedError("experts alone are transposed, and their sums are rounded")
