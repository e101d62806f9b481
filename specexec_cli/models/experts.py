"""A mixture's experts that come one by one from an ExpertStore, not with their layer.

transformers routes; the chosen experts are computed as they arrive. Every expert's output is kept
until all have arrived and then summed in the order of the experts' numbers. So a row's result does
not depend on which experts were in memory, which arrived first, or which the other rows chose.
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
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.expert_files import ExpertTensors
from specexec_cli.offload.experts import Batch


class ExpertSource(Protocol):
    """A layer source that also gives single experts."""

    def take(self, layer: int, wanted: Mapping[int, int], rows: int) -> Iterator[Batch]:
        """Yields every wanted expert once, in batches and in any order.

        Args:
            wanted: expert -> number of rows that are routed to it.
            rows: rows that were routed.
        Returns:
            batches of (expert, tensors by checkpoint name). A batch is on one device, and valid
            until the next batch is asked for.
        """


@dataclass(frozen=True, slots=True)
class SplitLayer:
    """The tensors of a layer: those that every row needs, and those of experts, if it has any."""

    dense: dict[str, TensorRange]  # parameter name inside the layer -> where its bytes are
    experts: list[dict[str, TensorRange]]  # per expert: parameter name inside the expert -> bytes


class StreamedExperts(nn.Module):
    """Takes the place of a PerExpert whose experts come one by one."""

    def __init__(
        self,
        block: PerExpert,
        layer: int,
        context: PassContext,
        tensors: list[dict[str, TensorRange]],
    ) -> None:
        """Uses the empty linears of `block`.

        Args:
            layer: the layer's index.
            tensors: see SplitLayer.experts.
        """
        super().__init__()
        self._block = [block]  # in a list, so that its parameters do not count as the layer's
        self._bindings = [
            Binding(linears, {path: tensor.name for path, tensor in expert.items()})
            for linears, expert in zip(block.experts, tensors, strict=True)
        ]
        self._layer, self._context = layer, context
        block.space = context.space

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
        """The outputs of a batch of experts, on the device of its weights and of the rows."""
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
        finally:  # the slot may be overwritten next, so no view of it may remain
            for expert, _ in batch:
                self._bindings[expert].release()


def split_layers(skeleton: Skeleton) -> list[SplitLayer]:
    """Divides each layer's tensors into those of experts and all others."""
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
    """Replaces each layer's PerExpert by a StreamedExperts."""
    for index, (layer, parts) in enumerate(zip(skeleton.layers, split, strict=True)):
        for path, block in list(layer.named_modules()):
            if isinstance(block, PerExpert):
                parent, _, leaf = path.rpartition(".")
                streamed = StreamedExperts(block, index, context, parts.experts)
                setattr(layer.get_submodule(parent), leaf, streamed)
