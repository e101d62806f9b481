"""Layers of an MLP alone, as Nemotron-H has them: nothing is kept of any token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specexec_cli.models.layer_state import Ints, LayerState
from specexec_cli.models.layer_states import LAYER_STATES


class Stateless(LayerState):
    """Counts slots, so that all layers of a model have the same number."""

    device = torch.device("cpu")
    kept_tensors = (0, 0)

    def begin(self, parents: Ints, pending: int) -> None:
        """Counts the rows of the pass, none of which the layer will append."""
        self.length += len(parents)

    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> Any:
        """Not to be called: there is nothing to append to."""
        raise NotImplementedError

    def commit(self, prefix_len: int, slots: Tensor) -> None:
        """See LayerState."""
        self.length = prefix_len + len(slots)

    def crop(self, length: int) -> None:
        """See LayerState."""
        self.length = length

    def copy(self, other: Self, length: int) -> None:
        """See LayerState."""
        self.length = length

    def bring_back(
        self, length: int, filled: int, state: Sequence[Tensor], device: torch.device
    ) -> None:
        """See LayerState."""
        self.length = length

    def release(self) -> None:
        """See LayerState."""
        self.length = 0

    @property
    def nbytes(self) -> int:
        """None."""
        return 0


def _state(config: PretrainedConfig) -> LayerState:
    return Stateless()


LAYER_STATES["mlp"] = LAYER_STATES["moe"] = _state
