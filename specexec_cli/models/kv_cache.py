"""The KV cache: keys and values in slots that can be reordered, so that slot is not position.

A draft node's row is in slot prefix + index, while its rotary position is prefix + depth. After
acceptance the accepted rows move to the front and the rest are dropped. Sliding-window layers keep
every row too: a row that has left the window of one branch may be inside that of another, so the
attention mask applies the window.

Texts that begin alike share rows. Those of the first text move into blocks that nobody writes to
(specexec_kernels/split_rows.py), and a copy takes the blocks in place of rows. A text's own rows
lie behind its blocks. A text that is cut back into a block copies what it keeps of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import torch
from specexec_kernels import dispatch
from specexec_kernels.split_rows import BLOCK_SLOTS, NO_FRONT, FrontRows, SplitRows, joined
from torch import Tensor

from specexec_cli.core import common_prefix
from specexec_cli.models.layer_state import Ints, LayerState, ModelState
from specexec_cli.planning.memory import STEP_SLOTS
from specexec_cli.transfers import sent

_GROWTH_SLOTS = 256  # an unreserved cache grows in steps of this size, so not in every pass
_MOVING = Lock()  # held while rows become blocks: a thread that writes kept rows reads them
Rows = Tensor | SplitRows


class SlotLayer(LayerState):
    """Keys and values of one layer, filled up to `length`.

    Attributes:
        front: the keys and the values of the first slots, which other texts may share.
        keys, values: (1, heads, capacity, head_dim) those of the slots behind them.
        shares: whether copies take blocks of each other's rows.
    """

    row_dim = 2
    kept_tensors = (2, 0)
    shares = True

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.front: tuple[FrontRows, FrontRows] = (NO_FRONT, NO_FRONT)
        self.reserved = 0
        self.zeroed = False  # whether unfilled slots hold zeros
        self.moves = 0  # how often the buffers were replaced
        self.write_slots: Tensor | None = None  # see SlotCache.writing_to

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates empty buffers with the heads, head size, dtype and device of the first rows."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._buffer(key_states, 0)
        self.values = self._buffer(value_states, 0)
        self.is_initialized = True

    def _buffer(self, like: Tensor, capacity: int) -> Tensor:
        shape = (like.shape[0], like.shape[1], capacity, like.shape[3])
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    @property
    def shared_slots(self) -> int:
        """Slots whose rows lie in blocks that other texts may share: the first."""
        return self.front[0].slots

    def grow(self, capacity: int) -> None:
        """Moves the filled rows behind the shared ones to buffers of `capacity` slots.

        Both new buffers are allocated before they replace the old ones, so that the layer is
        unchanged if memory runs out.
        """
        keys, values = self._moved(self.keys, capacity), self._moved(self.values, capacity)
        self.keys, self.values = keys, values
        self.moves += 1

    def _moved(self, rows: Tensor, capacity: int) -> Tensor:
        """A new buffer of `capacity` slots that holds the filled rows."""
        moved, filled = self._buffer(rows, capacity), self.length - self.shared_slots
        moved[:, :, :filled] = rows[:, :, :filled]
        if self.zeroed:
            moved[:, :, filled:].zero_()
        return moved

    def _room_for(self, stop: int) -> None:
        """Makes the buffers reach slot `stop`."""
        behind = stop - self.shared_slots
        if behind > self.keys.shape[2]:
            self.grow(self._capacity(behind, self.shared_slots))

    def _capacity(self, slots: int, shared: int) -> int:
        """Slots of new buffers that have room for so many behind the shared ones.

        Together they are no more than are reserved while these are enough, but for a block: a text
        that is cut back into its last shared one needs no memory.
        """
        if shared and shared + slots <= self.reserved:
            return max(self.reserved - shared, BLOCK_SLOTS)
        return max(-(-slots // _GROWTH_SLOTS) * _GROWTH_SLOTS, self.reserved - shared)

    def release(self) -> None:
        """Drops every row and frees the buffers."""
        self.length = 0
        self.front = NO_FRONT, NO_FRONT
        self.is_initialized = False
        self.keys = self.values = torch.empty(0)
        self.moves += 1

    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> tuple[Rows, Rows]:
        """Appends keys and values, (1, heads, n, head_dim) each.

        The parents are not used: the attention mask says to which rows a row attends.

        Returns:
            the keys and the values of every filled row.
        """
        key_states, value_states = rows
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.write_slots is not None:
            self.keys.index_copy_(2, self.write_slots, key_states)
            self.values.index_copy_(2, self.write_slots, value_states)
            return self.keys, self.values
        shared = self.shared_slots
        start = self.claim(key_states.shape[2]) - shared
        stop = self.length - shared
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        return self._rows(0, self.keys, stop), self._rows(1, self.values, stop)

    def _rows(self, which: int, own: Tensor, stop: int) -> Rows:
        """The shared rows and the first `stop` of its own, as attention reads them."""
        behind = own[:, :, :stop]
        return SplitRows(self.front[which], behind) if self.shared_slots else behind

    def filled(self) -> tuple[Rows, ...] | None:
        """All keys and all values, where attention reads them; None before the first row."""
        if not self.is_initialized:
            return None
        stop = self.length - self.shared_slots
        return self._rows(0, self.keys, stop), self._rows(1, self.values, stop)

    def claim(self, count: int) -> int:
        """Counts the next `count` slots as filled, which the caller does; returns the first."""
        start, stop = self.length, self.length + count
        self._room_for(stop)
        self.length = stop
        return start

    def commit(self, prefix_len: int, slots: Tensor) -> None:
        """Moves the rows of `slots` behind the first `prefix_len` rows; see LayerState."""
        if len(slots):
            self.compact(prefix_len, slots)
        else:
            self.crop(prefix_len)

    def crop(self, length: int) -> None:
        """Drops every slot from `length` on."""
        self.cut(length)

    def compact(self, prefix_len: int, kept: Tensor) -> None:
        """Keeps the first `prefix_len` rows and then `kept`, (n,) in rising order."""
        if shared := self.shared_slots:
            kept = kept - shared
        dispatch.compact_kv(self.keys[0], self.values[0], kept, prefix_len - shared)
        self.cut(prefix_len + int(kept.shape[0]))

    def cut(self, length: int) -> None:
        """Drops the rows from `length` on; if `zeroed`, clears them: they may hold NaN."""
        if length < self.shared_slots:
            self._leave_blocks(length)
        if self.zeroed and length < self.length:
            self.keys[:, :, length : self.length].zero_()
            self.values[:, :, length : self.length].zero_()
        self.length = min(self.length, length)

    def _leave_blocks(self, length: int) -> None:
        """Goes back to `length`, which lies in the shared rows: what is left of the last block
        becomes rows of its own."""
        blocks = length // BLOCK_SLOTS
        shared = blocks * BLOCK_SLOTS
        fronts = self.front[0].first(blocks), self.front[1].first(blocks)
        rows = []
        for front, own in zip(self.front, (self.keys, self.values), strict=True):
            rows.append(own)  # as it is at a block's edge, where nothing of its own is left
            for piece in front.pieces(shared, length):
                rows[-1] = self._buffer(own, self._capacity(length - shared, shared))
                rows[-1][:, :, : piece.shape[2]] = piece
        self._replace(fronts, rows, length)

    def _replace(
        self, fronts: tuple[FrontRows, FrontRows], rows: Sequence[Tensor], length: int
    ) -> None:
        """Takes blocks, buffers and length in one line: Ctrl-C between two would part them.

        Until then the layer has its old buffers beside the new ones, which no plan counts.
        """
        with _MOVING:
            self.front, (self.keys, self.values), self.length = fronts, rows, length
        self.moves += 1

    def copy(self, other: SlotLayer, length: int) -> None:
        """Replaces this layer's rows by the first `length` rows of another text's same layer.

        Whole blocks of them are shared, so that only the rest is copied.
        """
        self.length, self.front = 0, (NO_FRONT, NO_FRONT)
        if length:
            shares = self.shares and other.shares
            front = other.in_blocks(length // BLOCK_SLOTS if shares else 0)
            shared = front[0].slots
            theirs = other.kept_rows(shared, length)
            if not self.is_initialized:
                self.room_for(0, 0, theirs, other.device)
            if shared:  # what the buffers had room for is in the blocks
                capacity = self._capacity(length - shared, shared)
                rows = [self._buffer(each, capacity) for each in (self.keys, self.values)]
                self._replace(front, rows, shared)
            own = self.room_for(shared, length, theirs, other.device)
            for here, there in zip(own, theirs, strict=True):
                here.copy_(there)
            self.length = length

    def in_blocks(self, count: int) -> tuple[FrontRows, FrontRows]:
        """The first rows as `count` blocks, all of them filled, for other texts to share.

        Rows that are in no block yet move: this text has its own rows behind them from now on.
        """
        shared = self.shared_slots
        if (moved := count * BLOCK_SLOTS - shared) > 0:
            behind = self.length - shared - moved
            capacity = self._capacity(behind, shared + moved)
            fronts, rows = [], []
            for front, own in zip(self.front, (self.keys, self.values), strict=True):
                fronts.append(front.longer(own[:, :, :moved]))
                rows.append(self._buffer(own, capacity))
                rows[-1][:, :, :behind] = own[:, :, moved : moved + behind]
            self._replace((fronts[0], fronts[1]), rows, self.length)
        return self.front[0].first(count), self.front[1].first(count)

    def first_rows(self, count: int) -> Sequence[Tensor]:
        """The keys and the values of the first slots, filled or not, as attention reads them."""
        return self.kept_rows(0, count)

    def kept_rows(self, start: int, stop: int) -> list[Tensor]:
        """The keys and the values of some slots, (1, heads, stop - start, head_dim) each: views,
        but for slots that lie in several pieces."""
        with _MOVING:
            fronts, rows = self.front, (self.keys, self.values)
        found = []
        for front, own in zip(fronts, rows, strict=True):
            behind = slice(max(start - front.slots, 0), max(stop - front.slots, 0))
            pieces = front.pieces(start, stop)
            if not pieces or behind.stop > behind.start:
                pieces.append(own[:, :, behind])
            found.append(joined(pieces))
        return found

    def room_for(
        self, start: int, stop: int, like: Sequence[Tensor], device: torch.device
    ) -> list[Tensor]:
        """See LayerState; grows the buffers at most once."""
        if not self.is_initialized:
            no_rows = (
                torch.empty(*each.shape[:2], 0, each.shape[3], dtype=each.dtype, device=device)
                for each in like
            )
            self.lazy_initialization(*no_rows)
        self._room_for(stop)
        own = slice(start - self.shared_slots, stop - self.shared_slots)
        return [self.keys[:, :, own], self.values[:, :, own]]

    def bring_back(
        self, length: int, filled: int, state: Sequence[Tensor], device: torch.device
    ) -> None:
        """See LayerState."""
        self.length = max(length, filled)
        if self.is_initialized:  # not where memory ended before there was any row
            self.cut(length)

    def reserve(self, slots: int) -> None:
        """Makes the next growth reach at least `slots` slots."""
        self.reserved = slots

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, with those that other texts share."""
        if not self.is_initialized:
            return 0
        parts = (self.keys, self.values, *self.front[0].blocks, *self.front[1].blocks)
        return sum(part.numel() * part.element_size() for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlaces:
    """Where captured draft steps find the rows of a cache, and where they write.

    A step's masks have a column for every allocated slot, filled or not: first the slots of another
    cache, if the step reads rows of one, then the slots of its own cache.
    """

    shared: int  # slots whose rows are read from the other cache
    others: int  # columns for the other cache
    own: int  # columns for its own cache
    filled: int  # filled slots of its own cache
    moves: int  # how often the other cache's buffers were replaced

    @property
    def columns(self) -> int:
        """Columns of a step's masks."""
        return self.others + self.own


class HiddenRows(SlotLayer):
    """The rows that a model's head reads, one for each slot: behind the layers in a model's state.

    A target's MTP layer reads them. A row's first half is kept as a key, its other half as a value.
    """

    shares = False  # a head picks single rows

    def between(self, start: int, stop: int) -> Tensor:
        """The rows of some slots, (stop - start, hidden)."""
        return torch.cat([half[0, 0] for half in self.kept_rows(start, stop)], dim=-1)

    def at(self, slots: Ints) -> Tensor:
        """The rows of `slots`, (n,) int64, as (n, hidden)."""
        on_device = sent(torch.from_numpy(slots), self.keys.device)
        return torch.cat([half[0, 0, on_device] for half in (self.keys, self.values)], dim=-1)


def halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(1, n, hidden) rows as keys and values of one head, (1, 1, n, hidden / 2) each."""
    first, second = rows[:, None].chunk(2, dim=-1)
    return first, second


class SlotCache(ModelState):
    """The state of a model in which every layer attends; captured draft steps can read it."""

    layers: list[SlotLayer]

    def __init__(self, num_layers: int) -> None:
        super().__init__([SlotLayer() for _ in range(num_layers)])
        self.zeroed_capacity = 0
        self.read_by_steps = False  # see let_steps_read

    def reserve(self, slots: int) -> None:
        """Makes the next growth of every layer reach at least `slots` slots.

        If another model's captured steps read the buffers, all layers grow now, and in the large
        steps of `zeroed_capacity_for`.
        """
        if self.read_by_steps:
            slots = self.zeroed_capacity_for(slots, STEP_SLOTS)
        super().reserve(slots)
        for layer in self.layers:
            if self.read_by_steps and layer.is_initialized and layer.keys.shape[2] < slots:
                layer.grow(slots)

    def commit(self, prefix_len: int, path: Sequence[int]) -> None:
        """See ModelState; the begin of a path that lies in its place already is not moved."""
        in_place = common_prefix(path, range(prefix_len, prefix_len + len(path)))
        super().commit(prefix_len + in_place, path[in_place:])

    def make_room(self, slots: int) -> None:
        """Makes every layer have at least `slots` slots; for caches that have rows."""
        self.reserve(max(slots, *(layer.reserved for layer in self.layers)))
        for layer in self.layers:
            if layer.keys.shape[2] < slots:
                layer.grow(max(-(-slots // _GROWTH_SLOTS) * _GROWTH_SLOTS, layer.reserved))

    def keep_in_one_piece(self) -> None:
        """Has every layer's rows lie behind one address each, as captured steps read them."""
        for layer in self.layers:
            assert not layer.shared_slots, "its rows lie in blocks already"
            layer.shares = False

    def let_steps_read(self) -> None:
        """Prepares for another model's captured steps, which read every slot, filled or not.

        From now on unfilled slots hold zeros. A mask hides a slot by multiplying it by zero, and
        infinity or NaN in uninitialized memory would not become zero.
        """
        self.read_by_steps = True
        self.keep_in_one_piece()
        for layer in self.layers:
            layer.zeroed = True
            if layer.is_initialized:
                layer.keys[:, :, layer.length :].zero_()
                layer.values[:, :, layer.length :].zero_()
        self.reserve(max(layer.reserved for layer in self.layers))

    @property
    def capacity(self) -> int:
        """Slots that every layer has allocated; for caches that have rows."""
        return min(int(layer.keys.shape[2]) for layer in self.layers)

    @property
    def places(self) -> StepPlaces:
        """Where a captured step finds rows and writes them."""
        return StepPlaces(shared=0, others=0, own=self.capacity, filled=self.length, moves=0)

    def zeroed_capacity_for(self, slots: int, at_least: int) -> int:
        """The capacity, in slots, that `grow_zeroed` should give to make room for `slots`.

        The capacity never shrinks, and stays within `planned_slots` while that is enough. Above
        `at_least` it grows by four steps per doubling, so that buffers are seldom replaced.
        """
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

        Layers grow one after another: the old and new buffers of all layers together would take
        half as much memory again. If memory runs out in between, the cache is emptied: a step
        cannot use layers of different sizes, and one pass of the draft model computes the rows
        again.
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
        """Drops every row and frees all buffers, so that the cache is as new."""
        self.zeroed_capacity = 0
        super().release()

    @contextmanager
    def writing_to(self, slots: Tensor) -> Iterator[None]:
        """Makes layers write rows to `slots`, (rows,), and hand every slot to attention.

        Meant for passes with masks over the whole capacity. `advance` must then be told how many
        slots the pass has filled.
        """
        try:
            for layer in self.layers:
                layer.write_slots = slots
            yield
        finally:
            for layer in self.layers:
                layer.write_slots = None

    def advance(self, count: int) -> None:
        """Counts the next `count` slots as filled."""
        for layer in self.layers:
            layer.length += count
