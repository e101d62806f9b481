"""Keys and values of layers that attend, in slots that are ours to reorder: slot is not position.

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

from specexec_cli.core import common_prefix
from specexec_cli.models.layer_state import Ints, LayerState, ModelState
from specexec_cli.planning.memory import STEP_SLOTS

_GROWTH_SLOTS = 256  # an unreserved cache grows by this many, not by every pass


class SlotLayer(LayerState):
    """Keys and values of one layer, (1, heads, capacity, head_dim) each, filled up to `length`."""

    row_dim = 2

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

    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> tuple[Tensor, Tensor]:
        """Appends keys and values, (1, heads, n, head_dim) each.

        Whom a row attends to is in the mask, so the parents are of no use here.

        Returns:
            every filled row of both.
        """
        key_states, value_states = rows
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

    def commit(self, prefix_len: int, slots: Tensor, path_len: int) -> None:
        """Moves the rows of `slots` to the places behind the first `prefix_len`; see LayerState."""
        if len(slots):
            self.compact(prefix_len, slots)
        else:
            self.crop(prefix_len)

    def crop(self, length: int) -> None:
        """Drops every slot from `length` on."""
        self.cut(length)

    def compact(self, prefix_len: int, kept: Tensor) -> None:
        """Keeps the buffers' first `prefix_len` rows and then `kept`, (n,) in rising order."""
        for rows in (self.keys, self.values):
            dispatch.compact_kv(rows[0], kept, prefix_len)
        self.cut(prefix_len + int(kept.shape[0]))

    def cut(self, length: int) -> None:
        """Drops the buffers' rows from `length` on; a dropped row may hold what is no number."""
        if self.zeroed and length < self.length:
            self.keys[:, :, length : self.length].zero_()
            self.values[:, :, length : self.length].zero_()
        self.length = min(self.length, length)

    def copy(self, other: SlotLayer, length: int) -> None:
        """Takes the first `length` rows of the same layer of another text in place of its own."""
        self.length = 0
        if length:
            self.run(other.keys[:, :, :length], other.values[:, :, :length])

    def reserve(self, slots: int) -> None:
        """The next growth goes to at least this many slots."""
        self.reserved = slots

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        if not self.is_initialized:
            return 0
        return sum(part.numel() * part.element_size() for part in (self.keys, self.values))


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


class SlotCache(ModelState):
    """The state of a model all of whose layers attend, so that captured draft steps can read it."""

    layers: list[SlotLayer]

    def __init__(self, num_layers: int) -> None:
        super().__init__([SlotLayer() for _ in range(num_layers)])
        self.zeroed_capacity = 0
        self.read_by_steps = False  # see let_steps_read

    def reserve(self, slots: int) -> None:
        """The next growth of every layer goes to at least this many slots.

        Where another model's captured steps read the buffers it is now, for all layers, and as
        seldom as for steps of its own.
        """
        if self.read_by_steps:
            slots = self.zeroed_capacity_for(slots, STEP_SLOTS)
        super().reserve(slots)
        for layer in self.layers:
            if self.read_by_steps and layer.is_initialized and layer.keys.shape[2] < slots:
                layer.grow(slots)

    def commit(self, prefix_len: int, path: Sequence[int], below: Sequence[int] = ()) -> None:
        """See ModelState; the begin of a path that lies in its place already is not moved."""
        in_place = common_prefix(path, range(prefix_len, prefix_len + len(path)))
        super().commit(prefix_len + in_place, path[in_place:], below)

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
        super().release()

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
