"""A draft model's state that goes on from the target's.

A target's own low-bit copy has keys and values of the same shapes as the target. Rows that the
target has computed exactly need no second, less exact copy. So the first rows are read from the
target's cache, and this cache keeps only the rows after them: those of the last committed token and
of draft nodes, and those of a short prompt until the target has computed them. A pass of the target
appends behind the shared rows and does not change them. Captured steps on a GPU read every slot
that either cache has allocated, and a mask hides the unused ones.
Source: SubSpec, arXiv:2509.18344.

A recurrent layer's state is of the same shape too: the copy's begins as the target's behind the
last row that the target has computed, and the target goes back to checkpoints for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from specexec_kernels.split_rows import in_one_piece
from torch import Tensor

from specexec_cli.models.kv_cache import SlotCache, SlotLayer, StepPlaces
from specexec_cli.models.layer_state import Ints, LayerState, ModelState
from specexec_cli.models.recurrent import Parts, RecurrentState


class _SharedLayer(SlotLayer):
    """The first `shared` rows of another layer, then rows of its own; `length` counts its own."""

    shares = False

    def __init__(self, first: SlotLayer) -> None:
        super().__init__()
        self.shared = 0
        self.others = 0  # slots of the other layer that captured steps read
        self._first = first

    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> tuple[Tensor, Tensor]:
        """Appends (1, heads, n, head_dim) rows; returns all rows, with shared ones copied."""
        keys, values = (in_one_piece(each) for each in super().append(rows, parents))
        count = self.shared if self.write_slots is None else self.others
        if not count:
            return keys, values
        first_keys, first_values = self._first.first_rows(count)
        return torch.cat([first_keys, keys], dim=2), torch.cat([first_values, values], dim=2)

    def get_seq_length(self) -> int:
        """Filled slots, shared ones included."""
        return self.shared + self.length

    def copy(self, other: SlotLayer, length: int) -> None:
        """Drops every own row, and reads the first `length` rows of the other layer in place of a
        copy."""
        assert other is self._first, "only the layer that it was made for is read"
        self.cut(0)
        self.shared = length

    def reachable(self, length: int) -> int:
        """The greatest length up to `length` that `crop` can go back to."""
        return min(length, self.get_seq_length())

    def crop(self, length: int) -> None:
        """Drops every slot from `length` on; dropped shared slots are no longer read."""
        self.cut(max(0, length - self.shared))
        self.shared = min(self.shared, length)


class SharedCache(SlotCache):
    """A SlotCache that reads its first slots from the cache `target`; see `sharing`."""

    layers: list[_SharedLayer]

    def __init__(self, target: SlotCache) -> None:
        super().__init__(0)
        self.layers = [_SharedLayer(layer) for layer in target.layers]
        self._target = target

    @property
    def is_initialized(self) -> bool:
        """Whether both caches have buffers."""
        return super().is_initialized and self._target.is_initialized

    @property
    def places(self) -> StepPlaces:
        """Where a captured step finds rows and writes them."""
        return StepPlaces(
            shared=min(layer.shared for layer in self.layers),
            others=self._target.capacity,
            own=self.capacity,
            filled=min(layer.length for layer in self.layers),
            moves=sum(layer.moves for layer in self._target.layers),
        )

    @contextmanager
    def writing_to(self, slots: Tensor) -> Iterator[None]:
        """As SlotCache.writing_to; the slots are those of this cache's own buffers."""
        others = self._target.capacity
        for layer in self.layers:
            layer.others = others
        with super().writing_to(slots):
            yield


def sharing(own: ModelState, target: ModelState) -> ModelState:
    """A draft model's state that goes on from the target's.

    Its `copy` of the target's state moves no rows and drops all of its own. Nothing is committed to
    it: what the target has committed is shared.

    Args:
        own: an empty state of the draft model, whose layers are of the same kinds as the target's.
    """
    if isinstance(target, SlotCache):
        return SharedCache(target)
    pairs = zip(own.layers, target.layers, strict=True)
    return ModelState([_sharing(layer, first) for layer, first in pairs])


def _sharing(own: LayerState, first: LayerState) -> LayerState:
    if isinstance(first, SlotLayer):
        return _SharedLayer(first)
    if isinstance(own, Parts):
        assert isinstance(first, Parts), "both models have layers of the same kinds"
        pairs = zip(own.parts, first.parts, strict=True)
        own.parts = tuple(_sharing(part, theirs) for part, theirs in pairs)
    elif isinstance(own, RecurrentState):
        own.keeps_checkpoints = False
    return own
