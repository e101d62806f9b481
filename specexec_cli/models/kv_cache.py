"""Key/value cache whose slots are ours to reorder: slot is not position.

A draft node's row sits at slot prefix + index while its rotary position is prefix + depth. After
acceptance the accepted rows move to the front and the rest are dropped. Sliding-window layers keep
every row too: the window lives in the attention mask, since a row that has left the window of one
branch may be inside that of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from specexec_kernels import dispatch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specexec_cli.planning.memory import STEP_SLOTS

_GROWTH_SLOTS = 256  # an unreserved cache grows by this many, not by every pass


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, (1, heads, capacity, head_dim) each, filled up to `length`."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.reserved = 0
        self.zeroed = False  # whether new buffers hold zeros where nothing was written
        self.moves = 0  # how often other buffers took the place of those before
        self.write_slots: Tensor | None = None  # see SlotCache.writing_to

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes heads, head size, dtype and device from the first rows."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._buffer(key_states, 0)
        self.values = self._buffer(value_states, 0)
        self.is_initialized = True

    def _buffer(self, like: Tensor, capacity: int) -> Tensor:
        shape = (like.shape[0], like.shape[1], capacity, like.shape[3])
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def grow(self, capacity: int) -> None:
        """Moves the filled rows to buffers of `capacity` slots.

        Both buffers are there before either takes its place: where memory runs out in between,
        the layer is as it was.
        """
        keys, values = self._moved(self.keys, capacity), self._moved(self.values, capacity)
        self.keys, self.values = keys, values
        self.moves += 1

    def _moved(self, rows: Tensor, capacity: int) -> Tensor:
        """The filled rows in a buffer of their own."""
        moved = self._buffer(rows, capacity)
        moved[:, :, : self.length] = rows[:, :, : self.length]
        if self.zeroed:
            moved[:, :, self.length :].zero_()
        return moved

    def release(self) -> None:
        """Drops every row and gives the buffers back."""
        self.length = 0
        self.is_initialized = False
        self.keys = self.values = torch.empty(0)
        self.moves += 1

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends (1, heads, n, head_dim) rows; returns every filled row."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.write_slots is not None:
            self.keys.index_copy_(2, self.write_slots, key_states)
            self.values.index_copy_(2, self.write_slots, value_states)
            return self.keys, self.values
        stop = self.length + key_states.shape[2]
        if stop > self.keys.shape[2]:
            self.grow(max(-(-stop // _GROWTH_SLOTS) * _GROWTH_SLOTS, self.reserved))
        self.keys[:, :, self.length : stop] = key_states
        self.values[:, :, self.length : stop] = value_states
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def compact(self, prefix_len: int, kept: Tensor) -> None:
        """Keeps the first `prefix_len` slots and then `kept`, (n,) slots in rising order."""
        for rows in (self.keys, self.values):
            dispatch.compact_kv(rows[0], kept, prefix_len)
        self.cut(prefix_len + int(kept.shape[0]))

    def cut(self, length: int) -> None:
        """Drops every slot from `length` on; a dropped row may hold what is no number."""
        if self.zeroed and length < self.length:
            self.keys[:, :, length : self.length].zero_()
            self.values[:, :, length : self.length].zero_()
        self.length = min(self.length, length)

    def copy_rows(self, other: SlotLayer, length: int) -> None:
        """Takes the first `length` rows of the same layer of another text in place of its own."""
        self.length = 0
        if length:
            self.update(other.keys[:, :, :length], other.values[:, :, :length])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Total slots after `query_length` more rows, and the first slot."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Filled slots."""
        return self.length

    def get_max_length(self) -> int:
        """-1: the cache grows as needed."""
        return -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlaces:
    """Where captured draft steps find the rows of a cache, and where they write.

    A step is given every allocated slot as a column, filled or not: first those of another cache,
    if rows of one are read, then its own.
    """

    shared: int  # slots that are read from the other cache
    others: int  # columns of the other cache
    own: int  # columns of its own buffers
    filled: int  # of its own slots
    moves: int  # how often the other cache's buffers were replaced

    @property
    def columns(self) -> int:
        """Of a step's masks."""
        return self.others + self.own


class SlotCache(Cache):
    """One SlotLayer per decoder layer."""

    layers: list[SlotLayer]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[SlotLayer() for _ in range(num_layers)])
        self.zeroed_capacity = 0
        self.planned_slots = 0  # that memory is planned for; doubling does not go beyond
        self.read_by_steps = False  # see let_steps_read

    @property
    def length(self) -> int:
        """Slots filled in every layer; between passes all layers have filled the same."""
        return min(layer.length for layer in self.layers)

    def reserve(self, slots: int) -> None:
        """The next growth of every layer goes to at least this many slots.

        Where another model's captured steps read the buffers it is now, for all layers, and as
        seldom as for steps of its own.
        """
        if self.read_by_steps:
            slots = self.zeroed_capacity_for(slots, STEP_SLOTS)
        for layer in self.layers:
            layer.reserved = slots
            if self.read_by_steps and layer.is_initialized and layer.keys.shape[2] < slots:
                layer.grow(slots)

    def let_steps_read(self) -> None:
        """From now on another model's captured steps read every slot, filled or not.

        So there are zeros where nothing was written, since a mask hides what it multiplies by
        zero, and only numbers become zero by that.
        """
        self.read_by_steps = True
        for layer in self.layers:
            layer.zeroed = True
            if layer.is_initialized:
                layer.keys[:, :, layer.length :].zero_()
                layer.values[:, :, layer.length :].zero_()
        self.reserve(max(layer.reserved for layer in self.layers))

    @property
    def capacity(self) -> int:
        """Slots allocated in every layer, once there are rows."""
        return min(int(layer.keys.shape[2]) for layer in self.layers)

    @property
    def places(self) -> StepPlaces:
        """Where a captured step finds rows; see there."""
        return StepPlaces(shared=0, others=0, own=self.capacity, filled=self.length, moves=0)

    def zeroed_capacity_for(self, slots: int, at_least: int) -> int:
        """The capacity at which `grow_zeroed` makes room for `slots`: never less than there is,
        no more than is planned while that is enough, and from `at_least` on each doubling goes
        in four steps, since buffers stay as they are until a text has outgrown them."""
        capacity, doubled = max(at_least, self.zeroed_capacity), at_least
        while capacity < slots:
            while capacity >= 2 * doubled:
                doubled *= 2
            capacity = min(capacity + -(-doubled // 4), 2 * doubled)
        if slots <= self.planned_slots:
            capacity = max(min(capacity, self.planned_slots), self.zeroed_capacity)
        return capacity

    def grow_zeroed(self, capacity: int) -> None:
        """Gives every layer new buffers of `capacity` slots, with zeros as in `let_steps_read`.

        One layer after another, since old and new buffers of all layers at once would take half as
        much memory again. Where it runs out in between, the cache is emptied: layers of different
        size are of no use to a step, and the rows cost one pass of the draft model.
        """
        self.zeroed_capacity = 0  # until all layers agree
        try:
            for layer in self.layers:
                layer.zeroed = True
                layer.grow(capacity)
        except BaseException:
            self.release()
            raise
        self.zeroed_capacity = capacity

    def release(self) -> None:
        """Drops every row and gives all buffers back: the cache is as new."""
        self.zeroed_capacity = 0
        for layer in self.layers:
            layer.release()

    @contextmanager
    def writing_to(self, slots: Tensor) -> Iterator[None]:
        """Rows go to `slots`, (rows,), whatever is filled, and every slot is handed to attention:
        for passes whose masks span the whole capacity. `advance` tells what they filled."""
        try:
            for layer in self.layers:
                layer.write_slots = slots
            yield
        finally:
            for layer in self.layers:
                layer.write_slots = None

    def advance(self, count: int) -> None:
        """Takes the next `count` slots as filled."""
        for layer in self.layers:
            layer.length += count

    def compact(self, prefix_len: int, kept: Sequence[int]) -> None:
        """Keeps the first `prefix_len` slots followed by the slots `kept`, which must rise."""
        if not kept:
            self.crop(prefix_len)
            return
        slots = torch.tensor(kept, device=self.layers[0].device)
        for layer in self.layers:
            layer.compact(prefix_len, slots)

    def copy_rows(self, other: SlotCache, length: int) -> None:
        """Takes the first `length` rows of another text's cache in place of its own."""
        for own, theirs in zip(self.layers, other.layers, strict=True):
            own.copy_rows(theirs, length)

    def crop(self, length: int) -> None:
        """Drops every slot from `length` on; also those an aborted pass left in some layers."""
        for layer in self.layers:
            layer.cut(length)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(
            part.numel() * part.element_size()
            for layer in self.layers
            if layer.is_initialized
            for part in (layer.keys, layer.values)
        )
