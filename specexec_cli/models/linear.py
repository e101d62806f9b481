"""Linear layers that keep their weights in the file's dtype.

Weights are streamed in the checkpoint's dtype; a session computes in its own. Each weight is
rounded to the dtype of the rows that it is multiplied by, so it has the same value in every tier:
the weights of a resident layer are converted when they are loaded. On a CPU the kernels round
weights as they read them (specexec_kernels.formats.plain).
"""

from __future__ import annotations

from typing import cast

import torch
from specexec_kernels import cpu_matmul
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.plain import DTYPES, plain_weight
from specexec_kernels.row_blocks import in_row_blocks
from torch import Tensor, nn
from torch.nn import functional


def mixed_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, block_rows: int | None = None
) -> Tensor:
    """rows @ weight.T + bias, computed in the dtype of `rows`, to which both are rounded.

    Args:
        rows: (..., in_features) in the compute dtype.
        weight: (out_features, in_features) in any float dtype.
        bias: (out_features,) in any float dtype, or None.
        block_rows: on a GPU, the rows of every product that PyTorch computes; see row_blocks.
    Returns:
        (..., out_features) in the compute dtype.
    """
    if _takes(rows.dtype, weight):
        return _product(rows, weight, bias)
    if bias is not None:
        bias = bias.to(rows.dtype)
    weight = weight.to(rows.dtype)
    if block_rows is None or rows.device.type == "cpu":
        return functional.linear(rows, weight, bias)
    flat = rows.reshape(-1, rows.shape[-1])
    out = in_row_blocks(flat, block_rows, lambda own: functional.linear(own, weight, bias))
    return out.view(*rows.shape[:-1], weight.shape[0])


def _takes(rows: torch.dtype, weight: Tensor) -> bool:
    """Whether the CPU kernels multiply rows of a dtype by this weight, whatever its dtype."""
    lies_there = weight.device.type == "cpu" and weight.is_contiguous()
    return lies_there and cpu_matmul.takes_plain(rows)


def _product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool = False
) -> Tensor:
    """`mixed_linear` by the CPU kernels, for rows and a weight that `_takes` accepts.

    Args:
        transposed: whether the weight is (in_features, out_features).
    """
    if weight.dtype not in DTYPES:
        weight = weight.to(rows.dtype)
    read = plain_weight(weight, transposed=transposed)
    out = cpu_matmul.matmul(rows.reshape(-1, read.in_features), read)
    if bias is not None:
        out += bias.to(rows.dtype)
    return out.to(rows.dtype).view(*rows.shape[:-1], read.out_features)


class MixedLinear(nn.Module):
    """An nn.Linear with a weight that may have another dtype than the input."""

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
        """Multiplies (..., in_features) to (..., out_features)."""
        return mixed_linear(rows, self.weight, self.bias, self.block_rows)

    def stored_weight(self) -> PackedWeight:
        """The weight that is bound to this module now."""
        # nn.Module's attribute lookup would be slow
        return plain_weight(cast(Tensor, self._parameters["weight"]))

    def wide(self, rows: Tensor) -> Tensor:
        """The product with float32 sums that are not rounded to the rows' dtype, on a GPU.

        Args:
            rows: (..., in_features) float16 or bfloat16.
        Returns:
            (..., out_features) float32.
        """
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
    """A MixedLinear with a weight that is stored as (in_features, out_features)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.weight = nn.Parameter(
            torch.empty(in_features, out_features, device="meta"), requires_grad=False
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies (..., in_features) to (..., out_features)."""
        if not _takes(rows.dtype, self.weight):
            return mixed_linear(rows, self.weight.t(), self.bias, self.block_rows)
        return _product(rows, self.weight, self.bias, transposed=True)

    def stored_weight(self) -> PackedWeight:
        """The weight that is bound to this module now."""
        return plain_weight(cast(Tensor, self._parameters["weight"]), transposed=True)

    def wide(self, rows: Tensor) -> Tensor:
        """Not supported, and not needed: see the message."""
        raise NotImplementedError("experts alone are transposed, and their sums are rounded")
