"""A model of which this machine has a span of layers, and other machines the rest.

Every machine builds the whole model without weights, opens the layers of its span, and runs
transformers' own forward: rotary positions and masks are made from tokens and positions anew
everywhere, so that the residual stream travels, and back also the rows that a trained head reads. A
layer of another machine is passed over; the first of the first span sends the rows through all
spans, and that of the last has them back.

The residual stream is float32 in every compute dtype (decoder_layer.py), and travels as it is: a
row that was rounded on its way would not be the row of one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specexec_cli.errors import CheckpointError, WorkerError
from specexec_cli.models.layer_state import SlotCount
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.skeleton import Skeleton

# What layers are given beside the residual stream that each machine makes itself.
_MADE_ANYWHERE = frozenset({
    "attention_mask", "cache_position", "causal_mask", "past_key_value", "past_key_values",
    "position_embeddings", "position_ids",
})  # fmt: skip


class SpanLostError(WorkerError):
    """A machine with a span of layers is gone, and with it all rows that it kept."""


class Elsewhere(SlotCount):
    """In the place of what a layer of another machine keeps: how many slots are committed."""

    row_dim = 2

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True


class Passage(Protocol):
    """The way to a span of layers on another machine."""

    @property
    def span(self) -> range:
        """The layers."""

    def new_rows(self) -> Elsewhere:
        """What stands for the span's rows in the state of a new text."""


class RowsUnderWay(Protocol):
    """Rows on their way through all spans, one after another."""

    def wait(self, at: int) -> None:
        """Waits until span number `at` is behind them.

        Raises:
            SpanLostError: a machine is gone.
            WorkerError: a span could not be computed.
        """

    def rows(self) -> Tensor:
        """The rows behind the last span, which must have been waited for: (1, rows, hidden)
        float32."""

    def beside(self) -> Mapping[int, Tensor]:
        """The rows that a trained head reads and other machines made, by the number of the layer as
        PassContext counts them: (1, rows, hidden) each, in the compute dtype. They are given away.
        """

    def give_up(self) -> None:
        """Lets them go: nobody waits for them. May be called again, also where they arrived."""


class OtherMachines(Protocol):
    """All machines that have spans of a model's layers."""

    @property
    def passages(self) -> Sequence[Passage]:
        """The ways to their spans, in the order of the layers."""

    @property
    def as_planned(self) -> bool:
        """Whether every span is on the machine, and streams or not, as planned. A pass is one wave
        where not: what a machine that has another's layers reads from an SSD would come for each.
        """

    def send(
        self,
        parts: Sequence[PassRows],
        rows: Sequence[Sequence[Any]],
        hidden: Tensor,
        tuples: bool,
        before: RowsUnderWay | None,
    ) -> RowsUnderWay:
        """Sends rows through all spans, while this machine goes on; several may be under way.

        Args:
            parts: each text's rows.
            rows: for each passage and each text, what `new_rows` gave for it.
            hidden: (1, rows, hidden) float32, in front of the first span.
            tuples: whether the model's layers give tuples that begin with the rows.
            before: those of the same pass that these come behind; None if they are its first. Where
                they fail, these go no further.
        """

    def reopen(self) -> None:
        """Has lost spans opened again; returns when every passage can be used.

        Raises:
            WorkerError: a machine did not come back, and no other one has room for its span.
        """

    def close(self) -> None:
        """Lets the machines go."""


class NoTable(nn.Module):
    """In the place of the embeddings on a machine that begins with rows of another: zeros."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.host_ids: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """For modelling code that reads the dtype or the device of the weight."""
        return torch.empty(0)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, rows) int64 -> (batch, rows, hidden) float32."""
        return torch.zeros(*ids.shape, self.hidden, device=ids.device)


class NoHead(nn.Module):
    """In the place of the head's linear on a machine whose passes compute no logits."""

    def forward(self, rows: Tensor) -> Tensor:
        """(1, 0, hidden) -> the same."""
        return rows

    wide = forward


def check_splits(
    skeleton: Skeleton, layers: Sequence[Any], states: Sequence[Any], span: range
) -> None:
    """Refuses models whose layers cannot be on several machines.

    A recurrent layer cannot be cut back everywhere. All of a model's keep their earlier states at
    the same lengths, so that one on the first machine answers for those of others.

    Args:
        layers: the model's DecoderLayers.
        states: for each, the kind of state other than keys and values that it keeps, or None.
        span: the layers that are opened here.
    Raises:
        CheckpointError: layers share keys, or none of the first machine's is recurrent where others
            are.
    """
    kind = skeleton.config.model_type
    if any(not layer.writes_cache for layer in layers):
        raise CheckpointError(
            f"models of type {kind} run on one machine alone, since layers attend to keys of "
            "earlier ones: leave `hosts` out"
        )
    recurrent = [
        at for at, state in enumerate(states)
        if state is not None and state(skeleton.config).kept_ends() is not None
    ]  # fmt: skip
    if recurrent and not span.start and not any(at in span for at in recurrent):
        raise CheckpointError(
            f"layer {recurrent[0]} is the first that keeps a recurrent state, and must be on this "
            "machine: give the other hosts fewer 'layers'"
        )


def check_rows_alone(given: Mapping[str, Any]) -> None:
    """Refuses a layer that reads more of each row than the residual stream.

    Args:
        given: the layer's arguments besides the residual stream, by name.
    Raises:
        CheckpointError: such an argument is not made from tokens and positions alone.
    """
    for name, value in given.items():
        if (
            name not in _MADE_ANYWHERE
            and isinstance(value, Tensor | tuple | list | dict)
            and (isinstance(value, Tensor) or len(value))
        ):
            raise CheckpointError(
                f"this model's layers read '{name}' beside the residual stream, so that they run "
                "on one machine alone: leave `hosts` out"
            )
