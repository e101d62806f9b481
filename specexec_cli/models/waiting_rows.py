"""Keys and values that wait in RAM: a pass brings those of each layer to the GPU for that layer.

A long context's keys and values may not fit a GPU beside the rest. A target whose weights are
streamed waits for them anyway, and of keys and values a pass needs far fewer bytes. They are copied
in front of a layer's attention, on the stream that computes, while the weights of the layers behind
it are on their way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from specexec_kernels.eight_bit_kv import unpack
from torch import Tensor

from specexec_cli.models.layer_state import Ints
from specexec_cli.models.rows_in_turn import TurnBuffers, TurnLayer
from specexec_cli.offload.link import use_device
from specexec_cli.offload.pinned import PinnedMemory

_CPU = torch.device("cpu")


class DeviceRows(TurnBuffers):
    """The buffers on a GPU that the layers of one text use in turn, and the copies back to RAM.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copied: Any = None  # an event behind the last copy

    def note_copies(self) -> None:
        """Notes that rows were sent to RAM, for `settle`."""
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.device))
        self._copied = copied  # recorded by now: another thread may wait for it

    def settle(self) -> None:
        """Waits until all rows are in RAM, so that the host may read and move them there."""
        if (copied := self._copied) is not None:
            use_device(self.device)
            copied.synchronize()


def _copy(target: Tensor, source: Tensor) -> None:
    """Enqueues copies of slots, head by head: such parts of both lie in one piece each."""
    for head in range(target.shape[1]):
        target[0, head].copy_(source[0, head], non_blocking=True)


class WaitingLayer(TurnLayer):
    """Keys and values of one layer in RAM, of which a pass sees copies on the GPU.

    Args:
        there: the buffers that this text's layers share.
        memory: where the RAM comes from.
        eight_bit: see TurnLayer.
    """

    shares = False  # they are copied to the GPU head by head

    def __init__(
        self, there: DeviceRows, memory: PinnedMemory, eight_bit: torch.dtype | None = None
    ) -> None:
        super().__init__(there, eight_bit)
        self._device_rows = there
        self._memory = memory
        self._give_back: Callable[[], object] = lambda: None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See SlotLayer; the rows lie in RAM, wherever the first ones are."""
        self.dtype, self.device = key_states.dtype, _CPU
        self._move(key_states, value_states, 0)
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        """See SlotLayer."""
        self._device_rows.settle()
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
        self._device_rows.settle()
        self._there.leave(self)
        super().release()
        self._give_back()

    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> tuple[Tensor, Tensor]:
        """See SlotLayer; what comes back lies on the GPU."""
        found = super().append(rows, parents)
        self._device_rows.note_copies()
        return found

    def fetch(self, there: Tensor, here: Tensor) -> None:
        """See TurnLayer."""
        if self._eight_bit is None:
            _copy(there, here)
        else:
            codes = torch.empty(here.shape, dtype=here.dtype, device=there.device)
            _copy(codes, here)
            unpack(codes, there)

    def store(self, here: Tensor, rows: Tensor) -> None:
        """See TurnLayer."""
        _copy(here, rows)

    def compact(self, prefix_len: int, kept: Tensor) -> None:
        """See SlotLayer."""
        self._device_rows.settle()
        super().compact(prefix_len, kept)

    def kept_rows(self, start: int, stop: int) -> list[Tensor]:
        """See SlotLayer."""
        self._device_rows.settle()
        return super().kept_rows(start, stop)
