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


class Expert:
    """One expert's gated MLP over linears of any kind, whose weights come with every call."""

    def __init__(
        self, linears: nn.ModuleDict, act_fn: nn.Module, tensors: dict[str, TensorRange]
    ) -> None:
        """Over empty linears.

        Args:
            linears: `gate`, `up` and `down`.
            tensors: by parameter name inside them, as `gate.weight`.
        """
        self._gate, self._up, self._down = (linears[name] for name in ("gate", "up", "down"))
        self._act_fn = act_fn
        # torch's functional_call looks through all modules at every call, which took longer than
        # the products of one row
        self._parameters = []
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            self._parameters.append((linears.get_submodule(path)._parameters, leaf, tensor.name))
        self._empty = [parameters[leaf] for parameters, leaf, _ in self._parameters]

    def __call__(self, stored: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, hidden).

        Args:
            stored: the expert's tensors by checkpoint names.
        """
        try:
            for parameters, leaf, name in self._parameters:
                parameters[leaf] = stored[name]  # type: ignore[assignment]
            output: Tensor = self._down(self._act_fn(self._gate(rows)) * self._up(rows))
        finally:  # no view may outlive the slot
            for (parameters, leaf, _), empty in zip(self._parameters, self._empty, strict=True):
                parameters[leaf] = empty
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
        # no modules: their parameters are none of the layer's
        self._experts = [
            Expert(cast(nn.ModuleDict, linears), block.act_fn, expert)
            for linears, expert in zip(block.experts, tensors, strict=True)
        ]
        self._layer, self._context = layer, context

    def forward(self, rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts; see PerExpert.forward."""
        source = cast(ExpertSource, self._context.source)
        picks = top_k_index.reshape(-1).cpu()
        chosen, counts = torch.unique(picks, return_counts=True)
        wanted = dict(zip(chosen.tolist(), counts.tolist(), strict=True))
        # which of the picks name an expert, and so which rows it is to compute, both rising
        order = torch.argsort(picks, stable=True)
        sizes = list(wanted.values())
        rows_of = torch.split(order // top_k_index.shape[1], sizes)
        pairs = zip(torch.split(order, sizes), rows_of, strict=True)
        places = dict(zip(wanted, pairs, strict=True))
        inputs = _Inputs(rows, top_k_weights.reshape(-1, 1))
        found: dict[int, Tensor] = {}  # expert -> what it adds to its rows
        for index, stored in source.take(self._layer, wanted, rows.shape[0]):
            device = next(iter(stored.values())).device
            own, weight = inputs.on(device)
            place, row = places[index]
            output = self._experts[index](stored, own[row.to(device)]) * weight[place.to(device)]
            found[index] = output.to(rows.device)
        total = torch.zeros_like(rows)
        for index in wanted:
            row = places[index][1].to(rows.device)
            total.index_add_(0, row, found[index].to(total.dtype))
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
