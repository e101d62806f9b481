"""The experts of a mixture's layer where they come one by one from an ExpertStore.

transformers routes; the chosen experts are computed as they arrive. Every expert's output is kept
until all are there and then summed in the order of the experts' numbers: a row's result is the same
whatever was in memory, whatever arrived first, and whatever the other rows chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from specexec_cli.models.linear import PerExpert
from specexec_cli.models.pass_context import PassContext
from specexec_cli.models.skeleton import Skeleton
from specexec_cli.offload.store import TensorRange


class ExpertSource(Protocol):
    """Where single experts come from."""

    def take(
        self, layer: int, wanted: Mapping[int, int], rows: int
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Each wanted expert (given with its rows) once and in any order, by checkpoint names."""


@dataclass(frozen=True, slots=True)
class SplitLayer:
    """A mixture's layer: what every row needs, and the experts; dense layers have none."""

    dense: dict[str, TensorRange]  # parameter name inside the layer -> where its bytes are
    experts: list[dict[str, TensorRange]]  # per expert: parameter name inside the expert -> bytes


class Expert(nn.Module):
    """One expert's gated MLP over linears of any kind."""

    def __init__(self, linears: nn.ModuleDict, act_fn: nn.Module) -> None:
        super().__init__()
        self.linears = linears  # `gate`, `up`, `down`
        self.act_fn = act_fn

    def forward(self, rows: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, hidden)."""
        linears = self.linears
        output: Tensor = linears["down"](self.act_fn(linears["gate"](rows)) * linears["up"](rows))
        return output


class StreamedExperts(nn.Module):
    """Stands in for PerExpert where experts are not part of the layer's own weights."""

    def __init__(
        self,
        block: PerExpert,
        layer: int,
        context: PassContext,
        tensors: list[dict[str, TensorRange]],
    ) -> None:
        """Over the empty linears of `block`.

        Args:
            tensors: see SplitLayer.experts.
        """
        super().__init__()
        # not submodules: their parameters are none of the layer's
        self._experts = [
            Expert(cast(nn.ModuleDict, linears), block.act_fn) for linears in block.experts
        ]
        self._names = [
            {f"linears.{name}": tensor.name for name, tensor in expert.items()}
            for expert in tensors
        ]
        self._layer, self._context = layer, context

    def forward(self, rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts; see PerExpert.forward."""
        source = cast(ExpertSource, self._context.source)
        picks = top_k_index.reshape(-1).cpu()
        chosen, counts = torch.unique(picks, return_counts=True)
        wanted = dict(zip(chosen.tolist(), counts.tolist(), strict=True))
        # for each expert the places in `picks` that name it, in rising order
        named = torch.split(torch.argsort(picks, stable=True), list(wanted.values()))
        places = dict(zip(wanted, named, strict=True))
        inputs = _Inputs(rows, top_k_weights.reshape(-1, 1))
        found: dict[int, tuple[Tensor, Tensor]] = {}  # expert -> its rows, and what it adds to them
        for index, stored in source.take(self._layer, wanted, rows.shape[0]):
            weights = {name: stored[place] for name, place in self._names[index].items()}
            device = next(iter(weights.values())).device
            own, weight = inputs.on(device)
            place = places[index].to(device)
            row = place // top_k_index.shape[1]
            output = functional_call(self._experts[index], weights, (own[row],)) * weight[place]
            found[index] = row.to(rows.device), output.to(rows.device)
        total = torch.zeros_like(rows)
        for index in wanted:
            row, weighted = found[index]
            total.index_add_(0, row, weighted.to(total.dtype))
        return total


class _Inputs:
    """Rows and weights of a layer on every device that computes experts."""

    def __init__(self, rows: Tensor, weights: Tensor) -> None:
        self._on = {rows.device: (rows, weights)}
        self._home = rows.device

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(rows, hidden) and (rows * chosen, 1) on a device, to which they are copied once."""
        if device not in self._on:
            rows, weights = self._on[self._home]
            self._on[device] = rows.to(device), weights.to(device)
        return self._on[device]


def split_layers(skeleton: Skeleton) -> list[SplitLayer]:
    """Which tensors of each layer are an expert's."""
    return [
        _split(layer, tensors)
        for layer, tensors in zip(skeleton.layers, skeleton.layer_tensors, strict=True)
    ]


def _split(layer: nn.Module, tensors: dict[str, TensorRange]) -> SplitLayer:
    experts: list[dict[str, TensorRange]] = []
    dense = dict(tensors)
    for path, block in layer.named_modules():
        if isinstance(block, PerExpert):
            for index, linears in enumerate(block.experts):
                prefix = f"{path}.experts.{index}."
                names = [name for name, _ in linears.named_parameters()]
                experts.append({name: dense.pop(prefix + name) for name in names})
    return SplitLayer(dense, experts)


def stream_experts(skeleton: Skeleton, split: list[SplitLayer], context: PassContext) -> None:
    """Puts a StreamedExperts in the place of each layer's PerExpert."""
    for index, (layer, parts) in enumerate(zip(skeleton.layers, split, strict=True)):
        for path, block in list(layer.named_modules()):
            if isinstance(block, PerExpert):
                parent, _, leaf = path.rpartition(".")
                streamed = StreamedExperts(block, index, context, parts.experts)
                setattr(layer.get_submodule(parent), leaf, streamed)
