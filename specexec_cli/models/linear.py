"""Linear layers and embeddings that keep their weights in the file's dtype.

Weights are streamed in the checkpoint's dtype and computed in the session's. Converting a whole
matrix first would write it to memory in the wider dtype and read it back: on a CPU kernels take
weights as they are (specexec_kernels.cpu_linear).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from specexec_kernels import cpu_linear
from torch import Tensor, nn
from torch.nn import functional


def mixed_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows @ weight.T + bias, computed in the dtype of `rows`.

    Args:
        rows: (..., in_features) in the compute dtype.
        weight: (out_features, in_features) in any float dtype.
        bias: (out_features,) in any float dtype, or None.
    Returns:
        (..., out_features) in the compute dtype.
    """
    if cpu_linear.takes(rows.dtype, weight):
        out = cpu_linear.product(rows.reshape(-1, rows.shape[-1]), weight)
        if bias is not None:
            out += bias
        return out.to(rows.dtype).view(*rows.shape[:-1], weight.shape[0])
    if bias is not None:
        bias = bias.to(rows.dtype)
    return functional.linear(rows, weight.to(rows.dtype), bias)


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


class _With:
    """A module of Python of which some names stand for something else."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """functional.linear, as modelling code calls it."""
    return mixed_linear(rows, weight, bias)


_FUNCTIONAL = _With(functional, linear=_linear)
_NN = _With(nn, functional=_FUNCTIONAL)
# what modelling code reaches functional.linear by -> what it reaches mixed_linear by
_IN_PLACE_OF = {functional: _FUNCTIONAL, nn: _NN, torch: _With(torch, nn=_NN)}


def with_mixed_linears(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module that multiplies by functional.linear, as transformers' routers do.

    It multiplies by mixed_linear: a row's choice of experts must not depend on how PyTorch rounds
    in passes with other rows. It is a copy of the function that sees other globals, since a mode of
    PyTorch's, which could tell calls apart as well, stays behind where Ctrl-C comes within it.
    """
    # inside the dispatch between implementations of experts, of which the eager one is wanted
    function = inspect.unwrap(type(module).forward)
    seen = {
        name: _IN_PLACE_OF[value]
        for name, value in function.__globals__.items()
        if isinstance(value, ModuleType) and value in _IN_PLACE_OF
    }
    copy = FunctionType(
        function.__code__, {**function.__globals__, **seen}, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, module)


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
