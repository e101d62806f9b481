"""Linear layers and embeddings that keep their weights in the file's dtype.

Weights are streamed in the checkpoint's dtype and computed in the session's. Converting a whole
matrix first would write it to memory in the wider dtype and read it back. On a CPU a kernel widens
weights of two bytes in the cache where they are multiplied; what it does not read is converted a
tile at a time, which keeps the wide copy in the cache as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from specexec_kernels import cpu_dot, cpu_half
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

# Elements of one converted tile: 2 MiB in float32, small enough for a shared L2/L3 slice and large
# enough that the matrix product runs at full rate (docs/experiments.md, "Tiles").
TILE_ELEMENTS = 512 * 1024


def mixed_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows @ weight.T + bias, computed in the dtype of `rows`.

    Args:
        rows: (..., in_features) in the compute dtype.
        weight: (out_features, in_features) in any float dtype.
        bias: (out_features,) in any float dtype, or None.
    Returns:
        (..., out_features) in the compute dtype.
    """
    kernel = _kernel(rows.dtype, weight)
    if kernel is not None:
        out = kernel(rows.reshape(-1, rows.shape[-1]), weight)
        if bias is not None:
            out += bias
        return out.to(rows.dtype).view(*rows.shape[:-1], weight.shape[0])
    if bias is not None:
        bias = bias.to(rows.dtype)
    if weight.dtype == rows.dtype:
        return functional.linear(rows, weight, bias)
    if weight.device.type != "cpu" or weight.numel() <= TILE_ELEMENTS:
        return functional.linear(rows, weight.to(rows.dtype), bias)
    out = _tiled_product(rows.reshape(-1, rows.shape[-1]), weight)
    if bias is not None:
        out += bias
    return out.view(*rows.shape[:-1], weight.shape[0])


def _kernel(dtype: torch.dtype, weight: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    """What multiplies rows of this dtype on a CPU, with float32 sums; None where PyTorch does.

    Rows of two bytes take one for every weight that it reads: PyTorch rounds a row's result in
    another way when the pass has other rows, and is several times slower where the CPU has no
    arithmetic in the dtype. For float32 rows the kernel is made for weights too large to be worth
    a converted copy.
    """
    if dtype == torch.bfloat16 and cpu_dot.supports(weight):
        return cpu_dot.matmul
    wanted = (
        weight.numel() > TILE_ELEMENTS if dtype == torch.float32 else cpu_half.is_emulated(dtype)
    )
    return _widened if wanted and cpu_half.supports(weight) else None


def _widened(rows: Tensor, weight: Tensor) -> Tensor:
    return cpu_half.matmul(rows.float(), weight)


def _tiled_product(rows: Tensor, weight: Tensor) -> Tensor:
    """(rows, in) @ weight.T for a matrix too large to be worth a converted copy."""
    out_features, in_features = weight.shape
    out = rows.new_empty(rows.shape[0], out_features)
    tile = max(1, TILE_ELEMENTS // in_features)
    converted = torch.empty(tile, in_features, dtype=rows.dtype)
    for start in range(0, out_features, tile):
        part = weight[start : start + tile]
        block = converted[: part.shape[0]]
        block.copy_(part)
        out[:, start : start + tile] = rows @ block.t()
    return out


class MixedLinear(nn.Module):
    """nn.Linear whose weight may be of another dtype than its input."""

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
        return mixed_linear(rows, self.weight, self.bias)

    def wide(self, rows: Tensor) -> Tensor:
        """(..., in_features) in two bytes, on a GPU -> (..., out_features) float32, as summed."""
        flat = rows.reshape(-1, self.in_features)
        output = torch.mm(flat, self.weight.to(rows.dtype).t(), out_dtype=torch.float32)
        if self.bias is not None:
            output += self.bias
        return output.view(*rows.shape[:-1], self.out_features)


class MixedEmbedding(nn.Module):
    """An embedding table in the file's dtype; only the rows looked up are converted.

    The wrapped module may scale its output (Gemma does), so it runs itself, over a small table of
    the rows that were asked for.
    """

    def __init__(self, embedding: nn.Module, table: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = embedding
        self.table = table
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, rows) int64 -> (batch, rows, hidden) in `dtype`."""
        found = self.table[ids.reshape(-1)].to(self.dtype)
        order = torch.arange(found.shape[0], device=ids.device).view(ids.shape)
        output: Tensor = functional_call(self.embedding, {"weight": found}, (order,))
        return output


class PerExpert(nn.Module):
    """Mixture-of-experts block over separate matrices, as checkpoints store them.

    transformers fuses the experts into three-dimensional tensors; that would copy every expert of
    a streamed layer, also those no row is routed to. Here each expert keeps its own linears.
    """

    def __init__(self, experts: nn.ModuleList, act_fn: nn.Module) -> None:
        super().__init__()
        self.experts = experts  # each with `gate`, `up`, `down`: (hidden <-> intermediate)
        self.act_fn = act_fn

    def forward(self, rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts.

        Args:
            rows: (rows, hidden).
            top_k_index: (rows, k) experts chosen by the router.
            top_k_weights: (rows, k) their weights.
        Returns:
            (rows, hidden).
        """
        total = torch.zeros_like(rows)
        for index in torch.unique(top_k_index).tolist():
            row, choice = torch.where(top_k_index == index)
            expert = self.experts[index]
            chosen = rows[row]
            output = expert["down"](self.act_fn(expert["gate"](chosen)) * expert["up"](chosen))
            weighted = output * top_k_weights[row, choice, None]
            total.index_add_(0, row, weighted.to(total.dtype))
        return total
