"""The experts of a mixture's layer where they come one by one from an ExpertStore.

transformers routes; the chosen experts are computed as they arrive. Every expert's output is kept
until all are there and then summed in the order of the experts' numbers: a row's result is the same
whatever was in memory, whatever arrived first, and whatever the other rows chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor, nn

from specexec_cli.models.binding import Binding
from specexec_cli.models.expert_mlp import ExpertWeights, PerExpert, Routing, RowSums
from specexec_cli.models.pass_context import PassContext
from specexec_cli.models.skeleton import Skeleton
from specexec_cli.offload.expert_files import ExpertTensors
from specexec_cli.offload.experts import Batch
from specexec_cli.offload.store import TensorRange


class ExpertSource(Protocol):
    """Where single experts come from."""

    def take(self, layer: int, wanted: Mapping[int, int], rows: int) -> Iterator[Batch]:
        """Each wanted expert (given with its rows) once and in any order, some at a time.

        Those of a batch are on one device, by checkpoint names, until the next is asked for.
        """


@dataclass(frozen=True, slots=True)
class SplitLayer:
    """A mixture's layer: what every row needs, and the experts; dense layers have none."""

    dense: dict[str, TensorRange]  # parameter name inside the layer -> where its bytes are
    experts: list[dict[str, TensorRange]]  # per expert: parameter name inside the expert -> bytes


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
        self._block = [block]  # in a list: its parameters are none of the layer's
        self._bindings = [
            Binding(linears, {path: tensor.name for path, tensor in expert.items()})
            for linears, expert in zip(block.experts, tensors, strict=True)
        ]
        self._layer, self._context = layer, context

    def forward(self, rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts; see PerExpert.forward."""
        source = cast(ExpertSource, self._context.source)
        routing = Routing(top_k_index)
        sums = RowSums(rows, top_k_weights, routing)
        for batch in source.take(self._layer, routing.wanted, routing.rows):
            device = next(iter(batch[0][1].values())).device
            output = self._compute(batch, sums.rows_on(device), routing)
            sums.add([expert for expert, _ in batch], output)
        return sums.total()

    def _compute(self, batch: Batch, rows: Tensor, routing: Routing) -> Tensor:
        """What the experts at hand give, on the device of the rows and of their weights."""
        block, chosen = self._block[0], [expert for expert, _ in batch]
        known = []
        if rows.device.type == "cpu":
            known = [self._known(expert, stored) for expert, stored in batch]
            if block.takes_together(rows, known):
                return block.compute(chosen, rows, routing, known)
        with self._bound(batch):
            return block.compute(chosen, rows, routing, known)

    def _known(self, expert: int, stored: ExpertTensors) -> ExpertWeights:
        """An expert's weights, looked up once for as long as it stays in its slot."""
        if not isinstance(stored.prepared, ExpertWeights):
            with self._bound([(expert, stored)]):
                stored.prepared = self._block[0].weights_of(expert)
        return stored.prepared

    @contextmanager
    def _bound(self, batch: Batch) -> Iterator[None]:
        try:
            for expert, stored in batch:
                self._bindings[expert].bind(stored)
            yield
        finally:  # no view may outlive the slot
            for expert, _ in batch:
                self._bindings[expert].release()


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
