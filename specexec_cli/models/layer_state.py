"""The interface to the state that a model's layers keep between passes, whatever their kind.

A layer that attends keeps keys and values, one row for each token. A recurrent layer keeps a state
from which no single token can be removed. Passes, drafters and sessions treat both alike: rows are
appended, each behind its parent; the rows of an accepted path are committed; and a text is cropped
where the next text begins to differ from it.

A slot is the number of a row in the order of appending: first the rows of committed tokens, then
those of draft nodes. To add a kind of state, write a subclass of LayerState and register it in
LAYER_STATES under the name that transformers' configs give such layers in `layer_types`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specexec_cli.models.pass_rows import PassRows
from specexec_cli.transfers import sent

Ints = NDArray[np.int64]
_CPU = torch.device("cpu")
_NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


class LayerState(CacheLayerMixin):
    """The state that one decoder layer keeps between passes.

    `length` is its number of slots. Appended rows stay undecided until `commit`, and `crop` drops
    the rows of an interrupted pass.
    """

    length: int = 0
    lost = False  # whether the rows were on a machine that is gone, see spans.py
    row_dim: int  # the dimension of appended tensors along which rows lie
    # How many tensors a text can be brought back from: of its rows, and of its state at one length.
    # None if it cannot be brought back, so that the text is read again.
    kept_tensors: tuple[int, int] | None = None
    _parents: Ints = _NO_ROWS  # parents of the present pass's rows
    _start: int = 0  # slots before the present pass
    _pending: int = 0  # rows of the present pass that are committed tokens

    def begin(self, parents: Ints, pending: int) -> None:
        """Begins a pass.

        Args:
            parents: (rows,) the slots of its rows' parents, -1 for none.
            pending: how many of its rows, the first, are committed tokens, and no draft nodes.
        """
        self._parents, self._start, self._pending = parents, self.length, pending

    def run(self, *rows: Tensor) -> Any:
        """Appends the next rows of the present pass; layers call it with those rows' tensors."""
        at, count = self.length - self._start, rows[0].shape[self.row_dim]
        return self.append(rows, self._parents[at : at + count])

    @abstractmethod
    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> Any:
        """Appends rows to the state.

        Args:
            rows: tensors that the state is made of, such as keys and values, with n rows along
                `row_dim`.
            parents: (n,) the slot of each row's parent, below the row's own slot; -1 for none.
        Returns:
            the tensors that the layer goes on with: all keys and values, or the rows' outputs.
        """

    @abstractmethod
    def commit(self, prefix_len: int, slots: Tensor) -> None:
        """Keeps the first `prefix_len` slots and then `slots`; drops all others.

        Args:
            slots: (n,) int64, rising: the accepted path, which continues the committed text.
        """

    @abstractmethod
    def crop(self, length: int) -> None:
        """Drops every slot from `length` on; `length` must be `reachable`."""

    def reachable(self, length: int) -> int:
        """The greatest length up to `length` that `crop` and `copy` can go back to."""
        return min(length, self.length)

    @abstractmethod
    def copy(self, other: Self, length: int) -> None:
        """Replaces this state by another text's first `length` slots, `reachable` in `other`."""

    @abstractmethod
    def release(self) -> None:
        """Drops every slot and frees all memory."""

    def reserve(self, slots: int) -> None:
        """Makes the next growth reach at least `slots` slots, in states that keep rows."""

    def keep_at(self, length: int) -> None:
        """Makes `length` reachable once the text is longer, in states that are not at all lengths:
        another text parts from this one there."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""

    # what is written to disk of a text and brought back later, see specexec_cli/prefixes

    def kept_rows(self, start: int, stop: int) -> list[Tensor]:
        """The committed rows in these slots, `kept_tensors[0]` tensors: views, or copies of rows
        that lie in several pieces."""
        return []

    def kept_ends(self) -> set[int] | None:
        """The lengths for which `kept_state` gives a state; None if rows are all that is kept."""
        return None

    def kept_state(self, length: int) -> list[Tensor]:
        """The state behind slot `length` - 1, `kept_tensors[1]` tensors that never change."""
        return []

    def room_for(
        self, start: int, stop: int, like: Sequence[Tensor], device: torch.device
    ) -> list[Tensor]:
        """Views of the slots from `start` on, to be filled with rows that `kept_rows` gave.

        Args:
            start: at most `length`.
            like: empty tensors (on "meta") with the sizes and dtypes of what `kept_rows` gave.
            device: where the layer computes.
        """
        return []

    def bring_back(
        self, length: int, filled: int, state: Sequence[Tensor], device: torch.device
    ) -> None:
        """Makes this the state of a text of `length` slots, whose rows fill `room_for`'s views.

        Args:
            filled: where those views end; what they hold from `length` on is no row.
            state: what `kept_state` gave.
        """
        raise NotImplementedError

    # methods that transformers calls on caches

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: a state takes its sizes from the first rows."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> Any:
        """The name under which transformers' attention calls `run`."""
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


class SlotCount(LayerState):
    """Of a layer that keeps no rows here: their number, so that all layers of a model have the
    same."""

    device = _CPU
    kept_tensors = (0, 0)

    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> Any:
        """Not to be called: there is nothing to append to."""
        raise NotImplementedError

    def commit(self, prefix_len: int, slots: Tensor) -> None:
        """See LayerState."""
        self.length = prefix_len + len(slots)

    def crop(self, length: int) -> None:
        """See LayerState."""
        self.length = min(self.length, length)

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


class ModelState(Cache):
    """The states of all layers of a model for one text."""

    layers: list[Any]  # of LayerState
    planned_slots: int = 0  # slots for which memory is planned

    def __init__(self, layers: Sequence[LayerState]) -> None:
        super().__init__(layers=list(layers))

    @property
    def length(self) -> int:
        """Slots of the layers; between passes all layers have the same number."""
        return min(layer.get_seq_length() for layer in self.layers)

    @property
    def lost(self) -> bool:
        """Whether a layer has lost its rows, so that the whole text must be read again."""
        return any(layer.lost for layer in self.layers)

    def begin(self, rows: PassRows) -> None:
        """Begins a pass that appends these rows to every layer."""
        for layer in self.layers:
            layer.begin(rows.parents, rows.pending)

    def reserve(self, slots: int) -> None:
        """Makes the next growth of every layer reach at least `slots` slots."""
        for layer in self.layers:
            layer.reserve(slots)

    def keep_at(self, length: int) -> None:
        """Makes every layer able to go back to `length`, which is still to come."""
        for layer in self.layers:
            layer.keep_at(length)

    def commit(self, prefix_len: int, path: Sequence[int]) -> None:
        """Keeps the first `prefix_len` slots, then the accepted path; drops all others.

        Args:
            path: slots of the accepted nodes, rising.
        """
        slots = torch.tensor(path, dtype=torch.int64)
        there = {_CPU: slots}  # layers may keep their rows on different devices
        for layer in self.layers:
            place = layer.device if len(slots) else _CPU
            if place not in there:
                there[place] = sent(slots, place)
            layer.commit(prefix_len, there[place])

    def reachable(self, length: int) -> int:
        """The greatest length up to `length` that every layer can go back to."""
        while (least := min(layer.reachable(length) for layer in self.layers)) < length:
            length = least
        return length

    def crop(self, length: int) -> int:
        """Drops every slot from `length` on, including those of an aborted pass in some layers.

        Returns:
            the slots that are left: fewer than `length` if a layer cannot go back to that length.
        """
        length = self.reachable(length)
        for layer in self.layers:
            layer.crop(length)
        return length

    def copy(self, other: ModelState, length: int) -> int:
        """Replaces this state by the first `length` slots of another text's.

        Returns:
            the copied slots: fewer than `length` if a layer of `other` cannot go back to it.
        """
        length = other.reachable(length)
        for own, theirs in zip(self.layers, other.layers, strict=True):
            own.copy(theirs, length)
        return length

    def release(self) -> None:
        """Drops every slot and frees all memory, so that the state is as new."""
        for layer in self.layers:
            layer.release()

    def kept_ends(self) -> set[int] | None:
        """The lengths for which every layer has a state; None if all of them keep rows alone."""
        found = [ends for layer in self.layers if (ends := layer.kept_ends()) is not None]
        return set.intersection(*found) if found else None

    @property
    def nbytes(self) -> int:
        """Bytes allocated for all layers."""
        return sum(layer.nbytes for layer in self.layers)
