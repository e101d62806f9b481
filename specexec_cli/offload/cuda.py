"""Layers on their way to a GPU: pinned RAM or SSD -> the ring on the device, ahead of the pass.

    host:    LayerStream, its memory registered with CUDA once
    device:  layer t goes to buffer t % buffers by one copy on a stream of its own; the pass waits
             for the copy's event, the copy for the event behind the pass's last use of the buffer

Nothing waits for the whole device. Same interface as LayerStream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from specexec_cli.config import Tier
from specexec_cli.device import format_bytes
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload.link import Link
from specexec_cli.offload.reader import Layout, Notice, Progress, lay_out
from specexec_cli.offload.resident import read_tensors, views
from specexec_cli.offload.store import TensorRange
from specexec_cli.offload.stream import LayerStream

# What kernels need to load 16 bytes at once; safetensors promises 8, and disk blocks keep them.
_ALIGNED_BYTES = 16


class DeviceStream:
    """A target's layers in cyclic order as tensors on a device."""

    def __init__(
        self,
        layers: Sequence[Sequence[TensorRange]],
        tiers: Sequence[Tier],
        link: Link,
        *,
        host_buffers: int = 3,
        device_buffers: int = 3,
        notice: Notice = lambda text: None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Load 'resident' and 'ram' layers and start to stream the first of the others.

        Args:
            tiers: per layer, where it waits for its turn.
            device_buffers: streamed layers on the device at once, the one in use included.
        Raises:
            StreamError: a file cannot be read.
            OutOfMemoryError: something does not fit into RAM or device memory.
        """
        if len(layers) != len(tiers) or device_buffers < 2:
            raise ValueError("one tier per layer and at least 2 buffers are needed")
        self.bytes_streamed = 0  # handed out from ring buffers so far
        self._link = link
        self._count = len(layers)
        self._next_layer = 0
        self._in_use: object | None = None  # of each use its own
        self._copying = False  # _copy_next() has not come to its end
        self._streamed = [i for i, tier in enumerate(tiers) if tier != "resident"]
        self._layouts: list[Layout] = [lay_out(layers[i]) for i in self._streamed]
        # where in a buffer a layer begins, so that its tensors do at multiples of _ALIGNED_BYTES
        self._shifts = [-layout.places[0][1] % _ALIGNED_BYTES for layout in self._layouts]
        self._host_tiers: list[Tier] = [
            "ssd" if tiers[i] == "ssd" else "ram" for i in self._streamed
        ]
        self._resident: dict[int, dict[str, Tensor]] = {}
        self._buffers: list[Tensor] = []
        self._registered: list[Tensor] = []
        self._held: tuple[AbstractContextManager[Tensor], Any] | None = None
        self._turn = self._copy_turn = 0  # handed out next; copied next
        self._free: list[Any] = []  # per buffer, the event behind its last use
        self._copied: dict[int, Any] = {}  # turn -> event of its copy
        self._host: LayerStream | None = None
        try:
            self._load_resident(layers, tiers, progress)
            if self._streamed:
                self._open_ring(layers, host_buffers, device_buffers, notice, progress)
        except BaseException:
            self.close()
            raise

    def _load_resident(
        self,
        layers: Sequence[Sequence[TensorRange]],
        tiers: Sequence[Tier],
        progress: Progress,
    ) -> None:
        chosen = [i for i, tier in enumerate(tiers) if tier == "resident"]
        total = sum(tensor.n_bytes for i in chosen for tensor in layers[i])
        done = 0
        for index in chosen:
            with _clear_shortage("a resident layer", sum(t.n_bytes for t in layers[index])):
                loaded = read_tensors(layers[index])
                self._resident[index] = {
                    name: tensor.to(self._link.device) for name, tensor in loaded.items()
                }
            done += sum(tensor.n_bytes for tensor in layers[index])
            progress(done, total)

    def _open_ring(
        self,
        layers: Sequence[Sequence[TensorRange]],
        host_buffers: int,
        device_buffers: int,
        notice: Notice,
        progress: Progress,
    ) -> None:
        self._host = LayerStream(
            [layers[i] for i in self._streamed], self._host_tiers, buffers=host_buffers,
            notice=notice, progress=progress,
        )  # fmt: skip
        for blob in self._host.blobs:
            if blob.numel() and self._link.register(blob):
                self._registered.append(blob)
            elif blob.numel():
                notice(
                    "the driver refuses to pin memory, so copies to the GPU are slower and do not "
                    "overlap: raise the limit on locked memory (ulimit -l); WSL2 has one of its own"
                )
                break
        size = max(layout.buffer_bytes for layout in self._layouts) + _ALIGNED_BYTES
        for _ in range(min(device_buffers, len(self._streamed) + 1)):
            with _clear_shortage("a ring buffer on the device", size):
                buffer = torch.empty(size, dtype=torch.uint8, device=self._link.device)
            self._buffers.append(buffer)
            self._free.append(self._link.compute_mark())
        self._copy_ahead()

    @property
    def wait_s(self) -> float:
        """Seconds the consumer waited for the disk."""
        return self._host.wait_s if self._host else 0.0

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk."""
        return self._host.bytes_read if self._host else 0

    @property
    def read_s(self) -> float:
        """Seconds during which the disk was being read."""
        return self._host.read_s if self._host else 0.0

    @contextmanager
    def layer(self, index: int) -> Iterator[dict[str, Tensor]]:
        """The layer's tensors by name on the device, in file dtype and shape.

        Work enqueued on the current stream inside the `with` may use them.

        Raises:
            StreamError: the file could not be read, by name and offset.
        """
        if index != self._next_layer or self._in_use:
            raise RuntimeError(f"layer {index} asked for, next is {self._next_layer}")
        following = (index + 1) % self._count
        if index in self._resident:
            self._copy_ahead()
            self._next_layer = following
            yield dict(self._resident[index])
            return
        while self._copy_turn <= self._turn:
            self._copy_next()
        # until it is taken back, restart() has something to mend
        use = self._in_use = object()
        self._next_layer = following
        buffer = self._turn % len(self._buffers)
        place = self._turn % len(self._layouts)
        layout = self._layouts[place]
        # Enqueued work stays two layers ahead of the device, not a whole pass: an aborted pass then
        # ends, and a live status tells what was streamed.
        self._link.wait(self._free[(buffer + 1) % len(self._buffers)])
        self._link.compute_waits(self._copied.pop(self._turn))
        try:
            yield views(layout, self._buffers[buffer], self._shifts[place])
        finally:
            if self._in_use is use:  # or else restart() came first; see LayerStream.blob
                self.bytes_streamed += layout.tensor_bytes
                self._free[buffer] = self._link.compute_mark()
                self._turn += 1
                self._in_use = None
                self._copy_ahead()

    def _copy_ahead(self) -> None:
        """Enqueue the copies that have a buffer and whose bytes are in RAM; never waits."""
        while self._host is not None and self._copy_turn < self._turn + len(self._buffers):
            if self._held is not None:
                if not self._link.done(self._held[1]):
                    return
                self._release_held()
            if not self._host.ready():
                return
            self._copy_next()

    def _copy_next(self) -> None:
        """Enqueue the next layer's copy; waits for the disk if it must."""
        assert self._host is not None
        self._copying = True
        self._release_held()
        turn = self._copy_turn
        place = turn % len(self._layouts)
        buffer = turn % len(self._buffers)
        held = self._host.blob(place)
        blob = held.__enter__()
        size, shift = self._layouts[place].buffer_bytes, self._shifts[place]
        target = self._buffers[buffer][shift : shift + size]
        event = self._link.copy(target, blob[:size], self._free[buffer])
        self._held = held, event
        self._copied[turn] = event
        self._copy_turn += 1
        if self._host_tiers[place] == "ram":
            self._release_held(wait=False)  # nothing is ever written over it
        self._copying = False

    def _release_held(self, *, wait: bool = True) -> None:
        """Give the host buffer back to the disk reader once it has been copied."""
        if self._held is not None:
            held, event = self._held
            if wait:
                self._link.wait(event)
            self._held = None
            held.__exit__(None, None, None)

    @property
    def failed(self) -> bool:
        """Whether reading ahead has met an error."""
        return self._host is not None and self._host.failed

    def restart(self) -> None:
        """Begin again at layer 0 after an aborted pass; copies under way are waited for."""
        if not (self._next_layer or self._in_use or self._copying or self.failed):
            return  # a pass has just ended: what was copied ahead is right
        self._drain()
        if self._host is not None:
            self._host.restart()
        self._turn = self._copy_turn = self._next_layer = 0
        self._in_use, self._copying = None, False
        self._free = [self._link.compute_mark() for _ in self._buffers]
        self._copy_ahead()

    def _drain(self) -> None:
        for event in self._copied.values():
            self._link.wait(event)
        self._copied.clear()
        self._release_held()

    def close(self) -> None:
        """Stop the reader, unpin and free the memory, close the files. Idempotent."""
        self._drain()
        for event in self._free:
            self._link.wait(event)
        for blob in self._registered:
            self._link.unregister(blob)
        self._registered.clear()
        self._free.clear()
        self._buffers.clear()
        self._resident.clear()
        if self._host is not None:
            self._host.close()
            self._host = None

    def __enter__(self) -> DeviceStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextmanager
def _clear_shortage(purpose: str, n_bytes: int) -> Iterator[None]:
    """Device memory running out becomes one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise OutOfMemoryError(
            f"{purpose} needs {format_bytes(n_bytes)} of GPU memory, which is not free. "
            "Close what else runs on the GPU, or use a smaller draft model: `draft`"
        ) from None
