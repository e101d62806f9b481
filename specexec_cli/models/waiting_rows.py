"""Keys and values that wait in RAM: a pass brings those of each layer to the GPU for that layer.

A long context's keys and values may not fit a GPU beside the rest. A target whose weights are
streamed waits for them anyway, and of keys and values a pass needs far fewer bytes. They are copied
in front of a layer's attention, on the stream that computes, while the weights of the layers behind
it are on their way. All such layers of a text use the same buffers on the GPU, one after another.
Attention finds there what it finds in a SlotLayer, so a row has the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specexec_cli.models.kv_cache import SlotLayer
from specexec_cli.models.layer_state import Ints
from specexec_cli.offload.link import use_device
from specexec_cli.offload.pinned import PinnedMemory

_CPU = torch.device("cpu")


class DeviceRows:
    """The buffers on a GPU that the layers of one text use in turn.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: tuple[Tensor, ...] = ()
        self._holder: WaitingLayer | None = None  # whose rows the buffers hold
        self._copied: Any = None  # an event behind the last copy

    def bring(self, layer: WaitingLayer, count: int) -> tuple[Tensor, ...]:
        """Buffers of the layer's capacity that hold its first `count` keys and values."""
        stored = layer.keys, layer.values
        fits = [each.shape for each in self._buffers] == [each.shape for each in stored]
        if fits and self._holder is layer:
            return self._buffers  # the rows of this pass up to here were written there as well
        if not fits:
            self._buffers = ()  # before the new ones, which may need their memory
            self._buffers = tuple(torch.empty_like(each, device=self._device) for each in stored)
        self._holder = layer
        for there, here in zip(self._buffers, stored, strict=True):
            _copy(there, here, 0, count)
        return self._buffers

    def put(self, layer: WaitingLayer, rows: Sequence[Tensor], start: int) -> tuple[Tensor, ...]:
        """Writes new rows from slot `start` on, here and in RAM; returns all of the layer's rows.

        Args:
            rows: keys and values, (1, heads, n, head_dim) each.
        """
        stop = start + int(rows[0].shape[2])
        buffers = self.bring(layer, start)
        for there, here, new in zip(buffers, (layer.keys, layer.values), rows, strict=True):
            there[:, :, start:stop] = new
            _copy(here, there, start, stop)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self._device))
        self._copied = copied  # recorded by now: another thread may wait for it
        return tuple(each[:, :, :stop] for each in buffers)

    def rows_of(self, layer: WaitingLayer) -> tuple[Tensor, ...] | None:
        """All keys and values of the layer that the pass is in; None of another one."""
        if self._holder is not layer:
            return None
        return tuple(each[:, :, : layer.length] for each in self._buffers)

    def leave(self, layer: WaitingLayer) -> None:
        """Forgets the layer's rows, which may change from now on."""
        if self._holder is layer:
            self._holder = None

    def settle(self) -> None:
        """Waits until all rows are in RAM, so that the host may read and move them there."""
        if (copied := self._copied) is not None:
            use_device(self._device)
            copied.synchronize()


def _copy(target: Tensor, source: Tensor, start: int, stop: int) -> None:
    """Enqueues copies of slots, head by head: such parts of both lie in one piece each."""
    for head in range(target.shape[1]):
        target[0, head, start:stop].copy_(source[0, head, start:stop], non_blocking=True)


class WaitingLayer(SlotLayer):
    """Keys and values of one layer in RAM, of which a pass sees copies on the GPU.

    Args:
        there: the buffers that this text's layers share.
        memory: where the RAM comes from.
    """

    def __init__(self, there: DeviceRows, memory: PinnedMemory) -> None:
        super().__init__()
        self._there = there
        self._memory = memory
        self._give_back: Callable[[], object] = lambda: None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See SlotLayer; the rows lie in RAM, wherever the first ones are."""
        self.dtype, self.device = key_states.dtype, _CPU
        self._move(key_states, value_states, 0)
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        """See SlotLayer."""
        self._there.settle()
        self._there.leave(self)
        self._move(self.keys, self.values, capacity)
        self.moves += 1

    def _move(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        """Moves the filled rows to new memory of `capacity` slots of these keys' and values' sizes.

        The memory of both is one piece, which is unpinned when the layer ends, whoever ends it.
        """
        shapes = [(1, each.shape[1], capacity, each.shape[3]) for each in (keys, values)]
        sizes = [shape[1] * shape[2] * shape[3] * self.dtype.itemsize for shape in shapes]
        blob = self._memory.take(sum(sizes), "keys and values", "Use a shorter context")
        gives = weakref.finalize(self, self._memory.give, blob)
        gives.atexit = False  # the driver does it then
        parts = zip(torch.split(blob, sizes), shapes, strict=True)
        new = [part.view(self.dtype).view(shape) for part, shape in parts]
        if self.length:
            for after, before in zip(new, (keys, values), strict=True):
                after[:, :, : self.length] = before[:, :, : self.length]
        self._give_back()
        self._give_back = gives
        self.keys, self.values = new

    def release(self) -> None:
        """See SlotLayer."""
        self._there.settle()
        self._there.leave(self)
        super().release()
        self._give_back()

    def begin(self, parents: Ints, pending: int) -> None:
        """See LayerState; rows may have moved since the last pass."""
        super().begin(parents, pending)
        self._there.leave(self)

    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> tuple[Tensor, Tensor]:
        """See SlotLayer; what comes back lies on the GPU."""
        if not self.is_initialized:
            self.lazy_initialization(*rows)
        start = self.claim(rows[0].shape[2])
        keys, values = self._there.put(self, rows, start)
        return keys, values

    def filled(self) -> tuple[Tensor, ...] | None:
        """See SlotLayer: those on the GPU, while the pass is in this layer."""
        return self._there.rows_of(self)

    def compact(self, prefix_len: int, kept: Tensor) -> None:
        """See SlotLayer."""
        self._there.settle()
        super().compact(prefix_len, kept)

    def copy(self, other: SlotLayer, length: int) -> None:
        """See SlotLayer; rows are copied within RAM."""
        assert isinstance(other, WaitingLayer), "a layer waits in RAM in all texts or in none"
        other._there.settle()
        own = self.room_for(0, length, other.kept_rows(0, length), _CPU) if length else []
        for here, theirs in zip(own, other.kept_rows(0, length), strict=False):
            here.copy_(theirs)
        self.length = length

    def kept_rows(self, start: int, stop: int) -> list[Tensor]:
        """See SlotLayer."""
        self._there.settle()
        return super().kept_rows(start, stop)
