"""What the layers of a model keep between passes, whatever their kind.

A layer that attends keeps keys and values, one row for each token; a recurrent layer keeps a state,
from which no single token can be taken out again. Passes, drafters and sessions speak to both in
the same words: rows are appended, each behind its parent; the rows of an accepted path are
committed; and a text is cropped where another one begins to differ from it.

A slot is the number of a row in the order of appending: first those of the committed tokens, then
those of nodes of a draft tree. To add a kind of state, write a subclass of LayerState and register
it under the name that configs of transformers give such layers in `layer_types`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from specexec_cli.models.pass_rows import PassRows

Ints = NDArray[np.int64]
_NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


class LayerState(CacheLayerMixin):
    """All that one decoder layer keeps between passes.

    `length` counts its slots. What is appended stays undecided until `commit`: the rows of a pass
    that was interrupted are dropped by `crop`.
    """

    length: int = 0
    row_dim: int  # the dimension of appended tensors along which rows lie
    _parents: Ints = _NO_ROWS  # of the rows of the present pass
    _start: int = 0  # slots there were before that pass

    def begin(self, parents: Ints) -> None:
        """A pass begins whose rows have these parents, (rows,) slots; -1 is the text's begin."""
        self._parents, self._start = parents, self.length

    def run(self, *rows: Tensor) -> Any:
        """Appends the next rows of the pass that has begun; layers call it with their inputs."""
        at, count = self.length - self._start, rows[0].shape[self.row_dim]
        return self.append(rows, self._parents[at : at + count])

    @abstractmethod
    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> Any:
        """Takes rows in behind those that are there.

        Args:
            rows: what the layer keeps of each row, n rows along `row_dim`.
            parents: (n,) the slot behind which each row stands, below its own; -1 for none.
        Returns:
            what the layer computes with: every key and value, or the rows' outputs.
        """

    @abstractmethod
    def commit(self, prefix_len: int, slots: Tensor, path_len: int) -> None:
        """Keeps the first `prefix_len` slots and then `slots`; drops all others.

        Args:
            slots: (n,) int64, rising. The first `path_len` continue the committed text, one behind
                the other; the rest are nodes that stay undecided, each behind its ancestors.
        """

    @abstractmethod
    def crop(self, length: int) -> None:
        """Drops every slot from `length` on, a length that is `reachable`."""

    def reachable(self, length: int) -> int:
        """The most slots, of these, that `crop` and `copy` can go back to."""
        return min(length, self.length)

    @abstractmethod
    def copy(self, other: Self, length: int) -> None:
        """Takes the first `length` slots of another text, `reachable` there, for its own."""

    @abstractmethod
    def release(self) -> None:
        """Drops every slot and gives all memory back."""

    def reserve(self, slots: int) -> None:
        """The next growth is to make room for this many slots; of use to kinds that keep rows."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""

    # what transformers asks its caches

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """A state takes its sizes from the first rows it is given."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> Any:
        """As transformers' attention calls `run`."""
        return self.run(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Total slots after `query_length` more rows, and the first slot."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Filled slots."""
        return self.length

    def get_max_length(self) -> int:
        """-1: the state takes any number of rows."""
        return -1


class ModelState(Cache):
    """The states of all layers of a model for one text."""

    layers: list[Any]  # of LayerState
    planned_slots: int = 0  # that memory is planned for

    def __init__(self, layers: Sequence[LayerState]) -> None:
        super().__init__(layers=list(layers))

    @property
    def length(self) -> int:
        """Slots of every layer; between passes all layers have the same."""
        return min(layer.get_seq_length() for layer in self.layers)

    def begin(self, rows: PassRows) -> None:
        """A pass over these rows is about to append to every layer."""
        for layer in self.layers:
            layer.begin(rows.parents)

    def reserve(self, slots: int) -> None:
        """The next growth of every layer goes to at least this many slots."""
        for layer in self.layers:
            layer.reserve(slots)

    def commit(self, prefix_len: int, path: Sequence[int], below: Sequence[int] = ()) -> None:
        """Keeps the first `prefix_len` slots, the accepted path behind them, and nodes below it.

        Args:
            path: slots, rising.
            below: slots of nodes that stay undecided, rising, each behind its ancestors.
        """
        slots = torch.tensor([*path, *below], dtype=torch.int64)
        if len(slots):
            slots = slots.to(self.layers[0].device)
        for layer in self.layers:
            layer.commit(prefix_len, slots, len(path))

    def reachable(self, length: int) -> int:
        """The most slots, of these, that every layer can go back to."""
        while (least := min(layer.reachable(length) for layer in self.layers)) < length:
            length = least
        return length

    def crop(self, length: int) -> int:
        """Drops every slot from `length` on; also those an aborted pass left in some layers.

        Returns:
            the slots that are left: fewer than `length` where a layer cannot go back that far.
        """
        length = self.reachable(length)
        for layer in self.layers:
            layer.crop(length)
        return length

    def copy(self, other: ModelState, length: int) -> int:
        """Takes the first `length` slots of another text in place of its own.

        Returns:
            the slots that were copied: fewer where a layer of the other cannot go back that far.
        """
        length = other.reachable(length)
        for own, theirs in zip(self.layers, other.layers, strict=True):
            own.copy(theirs, length)
        return length

    def release(self) -> None:
        """Drops every slot and gives all memory back: the state is as new."""
        for layer in self.layers:
            layer.release()

    @property
    def nbytes(self) -> int:
        """Bytes allocated for all layers."""
        return sum(layer.nbytes for layer in self.layers)


StateKind = Callable[[PretrainedConfig], LayerState]

# by the names in the `layer_types` of transformers' configs
LAYER_STATES: dict[str, StateKind] = {}


def state_kind(config: PretrainedConfig, index: int) -> StateKind | None:
    """What makes the state of this layer; None where it keeps keys and values."""
    layer_types = getattr(config, "layer_types", None)
    return LAYER_STATES.get(layer_types[index]) if layer_types is not None else None
