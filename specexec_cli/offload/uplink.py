"""Copies bytes from RAM to a device, a piece at a time, from pinned RAM or by way of pinned slabs.

    registered RAM ------------------> device
    other RAM -----> pinned slab ----> device

At most IN_FLIGHT pieces are handed to the device's copy engine at once: one that it copies and one
to go on with. So the engine is never idle, and an upload by somebody else waits for no more than
these. While somebody else does upload, a pinned piece is copied in FINE_PARTS parts, and at most
FINE_PARTS copies are handed over at once.

Some drivers pin little memory (500 MB to 1 GB under WSL2 and in containers, microsoft/WSL#14078).
So the slabs are pinned first: any memory can go through them at the speed of a CPU's copy, and only
the copying thread waits for that copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specexec_cli.device import format_bytes
from specexec_cli.errors import StreamError
from specexec_cli.offload.link import Link
from specexec_cli.offload.memory import HugeBuffer
from specexec_cli.offload.reader import Notice
from specexec_cli.offload.resident import as_blob
from specexec_cli.offload.slabs import FINE_PARTS, IN_FLIGHT, STAGING_SLABS


def _whole() -> bool:
    """Says that nobody else uploads anything meanwhile, so that a piece is copied whole."""
    return False


class Uplink:
    """Copies pieces to a device in the order given. Used by one thread at a time."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._registered: dict[int, Tensor] = {}  # by address
        self._slabs: list[Tensor] = []
        self._staged = 0  # pieces that went through slabs
        self._pieces = 0  # sent so far
        # for each copy that may be under way, the number of its piece, and its event
        self._flying: deque[tuple[int, Any]] = deque()

    def pin(self, blobs: Sequence[Tensor], notice: Notice = lambda text: None) -> bool:
        """Registers memory, in the order given, as far as the driver grants it.

        Args:
            blobs: (bytes,) uint8 each, page-aligned, none larger than a piece.
            notice: called with one line of text if the driver refuses.
        Returns:
            Whether all of it is registered.
        Raises:
            OutOfMemoryError: there is no RAM for the slabs.
        """
        blobs = [blob for blob in blobs if blob.numel()]
        if not blobs:
            return True
        slabs = _new_slabs(max(blob.numel() for blob in blobs))
        if not all(map(self._register, slabs)):
            self._unregister(slabs)
            notice(
                "the driver refuses to pin memory, so copies to the GPU are slower: WSL2 and "
                "containers have a limit of their own, close other programs that use the GPU"
            )
            return False
        for number, blob in enumerate(blobs):
            if not self._register(blob):
                self._unregister(blobs[max(0, number - 1) : number])  # leaves a little for others
                self._slabs = slabs
                notice(
                    f"the driver pins {format_bytes(self.pinned_bytes)} and no more, so the CPU "
                    "copies the rest on its way to the GPU, which may be slower"
                )
                return False
        self._unregister(slabs)
        return True

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are registered, slabs included."""
        return sum(blob.numel() for blob in self._registered.values())

    def is_pinned(self, blob: Tensor) -> bool:
        """Whether a blob given to pin() is pinned, so that it is copied from where it lies."""
        return blob.data_ptr() in self._registered

    def send(
        self, target: Tensor, source: Tensor, after: Any, fine: Callable[[], bool] = _whole
    ) -> Any:
        """Enqueues the copy of a piece, which begins once `after` is done; returns its event.

        Waits for room among the pieces in flight. `source` must stay as it is until IN_FLIGHT
        further pieces were sent, or land() was called.

        Args:
            target: (bytes,) uint8 on the device.
            source: (bytes,) uint8, a blob that was given to pin(), or the beginning of one.
            fine: tells whether others upload something meanwhile; if so, a pinned piece is copied
                in FINE_PARTS parts.
        """
        in_parts = fine
        if self._slabs and not self.is_pinned(source):
            # the last copy out of this slab is older than IN_FLIGHT pieces, so it has ended
            slab = self._slabs[self._staged % STAGING_SLABS][: source.numel()]
            _stage(slab, source)
            self._staged += 1
            source, in_parts = slab, _whole  # here the link waits for the CPU, nobody for the link
        sent, event = 0, after
        while sent < source.numel():
            while self._flying and self._is_full():
                self._link.wait(self._flying.popleft()[1])
            parts = FINE_PARTS if in_parts() else 1
            part = slice(sent, sent - (-source.numel() // parts))
            event = self._link.copy(target[part], source[part], after)
            self._flying.append((self._pieces, event))
            sent = part.stop
        self._pieces += 1
        return event

    def _is_full(self) -> bool:
        """Whether the oldest copy in flight has to end before the next one is handed over."""
        oldest, _ = self._flying[0]
        return len(self._flying) >= FINE_PARTS or oldest <= self._pieces - IN_FLIGHT

    def land(self) -> None:
        """Waits until every piece has arrived."""
        while self._flying:
            self._link.wait(self._flying.popleft()[1])

    def close(self) -> None:
        """Waits for the copies in flight and unregisters all memory. Idempotent."""
        try:
            self.land()
        finally:
            self._unregister(list(self._registered.values()))
            self._slabs = []

    def _register(self, blob: Tensor) -> bool:
        if not self._link.register(blob):
            return False
        self._registered[blob.data_ptr()] = blob
        return True

    def _unregister(self, blobs: Sequence[Tensor]) -> None:
        for blob in blobs:
            if self._registered.pop(blob.data_ptr(), None) is not None:
                self._link.unregister(blob)


def copy_error(error: BaseException, what: str) -> Exception:
    """The one-line error that a copying thread's consumer raises for an error in that thread.

    Args:
        what: the thing that was to be copied, such as "a layer".
    """
    if isinstance(error, StreamError | torch.OutOfMemoryError):
        return type(error)(*error.args)
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return StreamError(f"copying {what} to the GPU failed: {reason}")


def _new_slabs(n_bytes: int) -> list[Tensor]:
    slabs = []
    for _ in range(STAGING_SLABS):
        buffer = HugeBuffer(n_bytes, "a slab for copies to the GPU", "Close other programs")
        slabs.append(as_blob(buffer))
        buffer.close()  # the blob holds the memory from now on
    return slabs


def _stage(slab: Tensor, source: Tensor) -> None:
    """Copies with the CPU; PyTorch uses several threads and lets other Python threads run."""
    slab.copy_(source)
