"""The thread that copies layers to a device, ahead of the pass and while the drafter works.

    copier:    layer 0 -> buffer 0, layer 1 -> buffer 1, ... next pass: layer 0 -> buffer k, ...
    consumer:  event = copier.take()  ...compute behind the event...  copier.give(mark)

A layer is copied in pieces (uplink.py): a 'ram' layer from the RAM that holds it, an 'ssd' layer
from slabs that readers fill from the disk. Only this thread waits for the disk, for the CPU's
copies, or for room in the device's copy queue.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specexec_cli.config import Tier
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.link import Link
from specexec_cli.offload.reader import Extent, Layout, Notice, Progress, as_range
from specexec_cli.offload.slabs import ALIGNED_BYTES, IN_FLIGHT, READ_SLABS, SWITCH_S
from specexec_cli.offload.stream import LayerStream
from specexec_cli.offload.uplink import Uplink, copy_error


class Copier:
    """Copies layers in cyclic order into a ring of device buffers, for one consumer thread."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        tiers: Sequence[Tier],
        buffers: Sequence[Tensor],
        link: Link,
        *,
        host_bytes: int,
        piece_bytes: int,
        notice: Notice,
        progress: Progress,
    ) -> None:
        """Load the 'ram' layers, pin what can be pinned, and begin to copy the first layers.

        Args:
            layouts: each layer's layout, in the order in which every pass uses them.
            tiers: each layer's tier, 'ram' or 'ssd'.
            buffers: the ring, (bytes,) uint8 each on the device. A turn is one layer of one pass;
                turn t goes to buffer t % len(buffers).
            host_bytes: bytes of RAM for the slabs of 'ssd' layers; READ_SLABS slabs at least.
            piece_bytes: bytes of one copy; a multiple of a disk's block.
        Raises:
            StreamError: a file cannot be read.
            OutOfMemoryError: something does not fit into RAM.
        """
        self._link = link
        self._shifts = [layout.shift(ALIGNED_BYTES) for layout in layouts]
        self._buffers = list(buffers)
        _switch_threads_often()
        self._pieces: list[list[tuple[int, Extent]]] = []  # per layer, numbered over all layers
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._turn = self._copy_turn = 0  # the turn handed out next; the turn copied next
        self._free = [link.compute_mark() for _ in buffers]  # by buffer: mark behind its last use
        self._copied: dict[int, Any] = {}  # turn -> event of its last piece
        self._busy = self._paused = self._closing = False
        self.fine = True  # whether the consumer makes small uploads at present
        self._stale = False  # restart() has begun and has not ended
        self._error: BaseException | None = None
        ranges: list[list[TensorRange]] = []
        each: list[Tier] = []
        for layout, tier in zip(layouts, tiers, strict=True):
            cut = layout.pieces(piece_bytes)
            self._pieces.append(list(enumerate(cut, start=len(ranges))))
            ranges += [[as_range(piece)] for piece in cut]
            each += [tier] * len(cut)
        slabs = max(READ_SLABS, host_bytes // piece_bytes)
        self._host = LayerStream(
            ranges, each, buffers=slabs, kept=IN_FLIGHT, notice=notice, progress=progress
        )
        self._uplink = Uplink(link)
        try:
            self._uplink.pin(self._host.blobs, notice)
            self._thread = threading.Thread(target=self._run, name="specexec-copy", daemon=True)
            self._thread.start()
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk."""
        return self._host.bytes_read

    @property
    def failed(self) -> bool:
        """Whether reading or copying ahead has met an error, or restart() did not end."""
        return self._stale or self._error is not None or self._host.failed

    def take(self) -> Any:
        """Waits until the next layer's copies are enqueued; returns the event behind them.

        Raises:
            StreamError: the layer could not be read or copied.
        """
        with self._changed:
            while self._turn not in self._copied and self._error is None:
                self._changed.wait()
            if self._turn in self._copied:
                return self._copied[self._turn]
            error = self._error
        assert error is not None
        raise copy_error(error, "a layer") from error

    def give(self, mark: Any) -> None:
        """Gives the layer's buffer back to the ring; `mark` is an event behind its last use."""
        with self._changed:
            self._free[self._turn % len(self._buffers)] = mark
            del self._copied[self._turn]
            self._turn += 1
            self._changed.notify_all()

    @property
    def next_buffer(self) -> int:
        """Index of the buffer that holds the layer in use or, if none is, the next layer."""
        return self._turn % len(self._buffers)

    def last_use(self, buffer: int) -> Any:
        """The mark behind the last use of a buffer."""
        return self._free[buffer]

    def restart(self) -> None:
        """Wait for the copies under way, and begin again at the first layer."""
        self._stale = True
        free = [self._link.compute_mark() for _ in self._buffers]
        with self._changed:
            self._paused = True
            try:
                while self._busy:
                    self._changed.wait()
                self._uplink.land()
                self._host.restart()
                self._copied.clear()
                self._turn = self._copy_turn = 0
                self._free = free
                self._error = None
                self._stale = False
            finally:
                self._paused = False
                self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads, unpin and free the memory, close the files. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()  # before the readers stop: it may wait for one of them
        try:
            self._uplink.close()
            for mark in self._free:
                self._link.wait(mark)
        finally:
            self._host.close()

    def _run(self) -> None:
        self._link.own_thread()
        while (turn := self._next_turn()) is not None:
            event: Any = None
            error: BaseException | None = None
            try:
                event = self._copy(turn)
            except BaseException as caught:  # handed to the consumer, which raises it
                # A traceback's frames would keep views of the memory alive.
                error = caught.with_traceback(None)
            with self._changed:
                if error is not None:
                    self._error = error
                elif event is not None:
                    self._copied[turn] = event
                    self._copy_turn = turn + 1

    def _next_turn(self) -> int | None:
        """The next layer to copy; waits for a free buffer; None when the copier is closed."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while not self._closing:
                free = self._copy_turn < self._turn + len(self._buffers)
                if free and not self._paused and self._error is None:
                    self._busy = True
                    return self._copy_turn
                self._changed.wait()
            return None

    def _copy(self, turn: int) -> Any:
        """Enqueues the pieces of a layer; returns the last one's event, or None if told to stop."""
        place, buffer = turn % len(self._pieces), turn % len(self._buffers)
        event = after = self._free[buffer]
        for number, piece in self._pieces[place]:
            if self._paused or self._closing:
                return None
            with self._host.blob(number) as blob:
                start = self._shifts[place] + piece.offset
                target = self._buffers[buffer][start : start + blob.numel()]
                event = self._uplink.send(target, blob, after, lambda: self.fine)
        return event


def _switch_threads_often() -> None:
    """Shortens the time for which the copying thread waits for the interpreter.

    It waits before every piece while another thread runs Python. Beside a loop of Python it sends
    125 pieces a second at the usual switch interval of 5 ms, and 713 at 0.5 ms, where the loop is
    no slower; at 0.2 ms the loop loses a tenth. close() does not set the interval back: other
    sessions may still copy, and a short interval costs nothing while no thread waits.
    """
    if sys.getswitchinterval() > SWITCH_S:
        sys.setswitchinterval(SWITCH_S)
