"""Layers of an MLP alone, as Nemotron-H has them: nothing is kept of any token."""

from __future__ import annotations

from transformers import PretrainedConfig

from specexec_cli.models.layer_state import Ints, LayerState, SlotCount
from specexec_cli.models.layer_states import LAYER_STATES


class Stateless(SlotCount):
    """Counts the rows of every pass, none of which the layer appends."""

    def begin(self, parents: Ints, pending: int) -> None:
        """See LayerState."""
        self.length += len(parents)


def _state(config: PretrainedConfig) -> LayerState:
    return Stateless()


LAYER_STATES["mlp"] = LAYER_STATES["moe"] = _state
