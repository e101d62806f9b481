"""Streams layers pass after pass: from the SSD through a ring of buffers, or from RAM.

    reader:    layer 0 -> buffer 0, layer 1 -> buffer 1, ... next pass: layer 0 -> buffer k, ...
    consumer:  with stream.layer(0) as tensors: ...   with stream.layer(1) as tensors: ...

The reader runs ahead as far as the ring allows and does not stop at the end of a pass, so the first
layers of the next pass are read while the drafter works. Knows neither models nor trees.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from specexec_cli.config import Tier
from specexec_cli.errors import StreamError
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.memory import HugeBuffer
from specexec_cli.offload.reader import (
    PIECE_BYTES,
    READER_THREADS,
    DirectFile,
    Extent,
    Notice,
    Progress,
    lay_out,
    once,
)
from specexec_cli.offload.resident import (
    StayingTensors,
    as_blob,
    check_free,
    load,
    open_files,
    read_tensors,
    views,
)

__all__ = ["LayerStream", "read_tensors"]


class LayerStream:
    """The layers of a target in cyclic order, 0..L-1, 0..L-1, ..., each as CPU tensors.

    One consumer thread. After an aborted pass call restart(); at the end close(), or use `with`.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[TensorRange]],
        tiers: Sequence[Tier],
        *,
        buffers: int = 3,
        kept: int = 0,
        notice: Notice = lambda text: None,
        progress: Progress = lambda done, total: None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Load the 'ram' layers and start to read the first 'ssd' layers.

        Args:
            layers: per layer, its tensors.
            tiers: per layer, where it is streamed from: 'ssd' or 'ram'.
            buffers: 'ssd' layers in memory at once, the one in use included; 2 or more.
            kept: buffers that stay untouched behind the one in use, since the consumer's copies
                from them may still be under way.
            notice: called with one line of text if something will be slower than it could be.
            progress: called with the bytes of 'ram' layers loaded so far and in all.
            piece_bytes: most bytes of one read; a multiple of a disk's block.
        Raises:
            StreamError: a file cannot be read.
            OutOfMemoryError: ring and 'ram' layers do not fit into free memory.
        """
        if len(layers) != len(tiers) or buffers < 2 + kept:
            raise ValueError("one tier per layer and at least 2 buffers beside the kept are needed")
        self.bytes_streamed = 0  # of the 'ssd' layers handed out so far
        self.bytes_read = 0  # by the reader, which runs ahead
        self.wait_s = 0.0  # the consumer waited for the reader
        self.layouts = [lay_out(layer) for layer in layers]
        self._streamed = [index for index, tier in enumerate(tiers) if tier == "ssd"]
        self._pieces = [self.layouts[index].pieces(piece_bytes) for index in self._streamed]
        self._resident: dict[int, Tensor] = {}  # blobs of the 'ram' layers
        self._views: dict[int, StayingTensors] = {}  # of the 'ram' layers, made at first use
        self._files: dict[Path, DirectFile] = {}
        self._buffers: list[HugeBuffer] = []
        self._kept = kept
        self._threads: list[threading.Thread] = []
        self._next_layer = 0
        self._in_use: object | None = None  # a new object for each use
        # The ring. A turn is one streamed layer of one pass; turn t lives in buffer t % buffers.
        self._lock = threading.Lock()
        self._layer_ready = threading.Condition(self._lock)
        self._work_ready = threading.Condition(self._lock)
        self._turn = 0  # the turn handed out next
        self._read_turn = 0  # the turn being read
        self._read_piece = 0  # the next piece of that turn
        self._missing: dict[int, int] = {}  # turn -> pieces not there yet
        self._in_flight = 0
        self._reading_s = 0.0  # with at least one read under way, up to the last pause
        self._reading_since = 0.0
        self._paused = self._closing = False
        self._error: BaseException | None = None
        try:
            self._open(tiers, buffers, notice, progress)
        except BaseException:
            self.close()
            raise

    def _open(
        self, tiers: Sequence[Tier], buffers: int, notice: Notice, progress: Progress
    ) -> None:
        notice = once(notice)
        ram = [index for index, tier in enumerate(tiers) if tier == "ram"]
        most = max(2, len(self._streamed) + 1) + self._kept
        buffers = min(buffers, most) if self._streamed else 0
        buffer_bytes = max((self.layouts[i].buffer_bytes for i in self._streamed), default=0)
        ram_bytes = sum(self.layouts[i].buffer_bytes for i in ram)
        check_free(
            buffers * buffer_bytes + ram_bytes,
            "the target's layers in RAM and its ring buffers",
            "Stream it from SSD instead: `offload='ssd'`" if ram else "Use a smaller target",
        )
        open_files(self._files, self.layouts, notice)
        loaded = load(
            [self.layouts[i] for i in ram], self._files, "the target's layers",
            "Stream it from SSD instead: `offload='ssd'`", progress,
        )  # fmt: skip
        self._resident = dict(zip(ram, loaded, strict=True))
        for _ in range(buffers):
            self._buffers.append(HugeBuffer(buffer_bytes, "a ring buffer", "Use a smaller target"))
        if self._buffers and not self._buffers[0].has_huge_pages():
            notice(
                "the kernel gives no huge pages, so the disk is read in small requests: "
                "set /sys/kernel/mm/transparent_hugepage/enabled to madvise"
            )
        if self._streamed:
            self._threads = [
                threading.Thread(target=self._read_loop, name=f"specexec-read-{n}", daemon=True)
                for n in range(READER_THREADS)
            ]
            for thread in self._threads:
                thread.start()

    @contextmanager
    def layer(self, index: int) -> Iterator[dict[str, Tensor]]:
        """The layer's tensors by name, in file dtype and shape. Valid inside the `with` only.

        Raises:
            StreamError: the file could not be read, by name and offset.
        """
        if index not in self._resident:
            with self.blob(index) as blob:
                yield views(self.layouts[index], blob)
            return
        self._next_layer = self._following(index)
        if index not in self._views:
            found = views(self.layouts[index], self._resident[index])
            self._views[index] = StayingTensors(found)
        yield self._views[index]

    @contextmanager
    def blob(self, index: int) -> Iterator[Tensor]:
        """Like layer(), but yields the bytes that the layout describes, (buffer bytes,) uint8."""
        following = self._following(index)
        resident = self._resident.get(index)
        if resident is not None:
            self._next_layer = following
            yield resident
            return
        self._wait_for_turn()
        # Ctrl-C may come between any two of these lines: until _in_use is taken back, restart()
        # knows that the turn and the next layer may not belong together.
        use = self._in_use = object()
        self._next_layer = following
        assert self._streamed[self._turn % len(self._streamed)] == index
        buffer = self._buffers[self._turn % len(self._buffers)]
        try:
            yield as_blob(buffer)[: self.layouts[index].buffer_bytes]
        finally:
            # If Ctrl-C came as the `with` was entered, this runs when Python drops the generator,
            # perhaps after restart(): then there is nothing left to do.
            if self._in_use is use:
                self.bytes_streamed += self.layouts[index].tensor_bytes
                with self._lock:
                    self._missing.pop(self._turn, None)
                    self._turn += 1
                    self._work_ready.notify_all()
                    self._in_use = None

    def _following(self, index: int) -> int:
        """The layer behind one that is asked for, which must be its turn."""
        if index != self._next_layer or self._in_use or self._closing:
            raise RuntimeError(
                f"layer {index} asked for, next is {self._next_layer}"
                + (", the one before is still in use" if self._in_use else "")
                + (", the stream is closed" if self._closing else "")
            )
        return (index + 1) % len(self.layouts)

    def _wait_for_turn(self) -> None:
        started = time.perf_counter()
        with self._lock:
            while not self._arrived():
                self._layer_ready.wait()
            self.wait_s += time.perf_counter() - started
            if isinstance(self._error, StreamError):
                raise StreamError(str(self._error))
            if self._error is not None:
                raise RuntimeError("the reader thread died") from self._error

    def _arrived(self) -> bool:
        """Whether the ring's next layer is there, or cannot come because of an error."""
        return self._error is not None or self._missing.get(self._turn) == 0

    @property
    def blobs(self) -> list[Tensor]:
        """All memory that layers are handed out from: ring buffers and 'ram' layers."""
        return [*map(as_blob, self._buffers), *self._resident.values()]

    @property
    def failed(self) -> bool:
        """Whether the reader has met an error, also one that the consumer has not seen yet."""
        return self._error is not None

    @property
    def read_s(self) -> float:
        """Seconds during which at least one read was under way; bytes_read / read_s is the rate."""
        with self._lock:
            current = time.perf_counter() - self._reading_since if self._in_flight else 0.0
            return self._reading_s + current

    def restart(self) -> None:
        """Begin again at layer 0 after an aborted pass; layers read ahead are dropped."""
        if not (self._next_layer or self._in_use or self._error):
            return  # a pass has just ended: the layers read ahead are the right ones
        with self._lock:
            self._paused = True
            try:
                while self._in_flight:
                    self._layer_ready.wait()
                self._turn = self._read_turn = self._read_piece = self._next_layer = 0
                self._missing.clear()
                self._in_use = None
                self._error = None
            finally:
                self._paused = False
                self._work_ready.notify_all()

    def close(self) -> None:
        """Stop the reader, close the files, give the memory back. Idempotent."""
        with self._lock:
            self._closing = True
            self._work_ready.notify_all()
        for thread in self._threads:
            thread.join()
        for file in self._files.values():
            file.close()
        self._resident.clear()
        self._views.clear()
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()

    def __enter__(self) -> LayerStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read_loop(self) -> None:
        while (work := self._next_piece()) is not None:
            turn, piece = work
            error: BaseException | None = None
            count = 0
            try:
                view = self._buffers[turn % len(self._buffers)].view
                target = view[piece.offset : piece.offset + piece.stop - piece.start]
                count = self._files[piece.path].read_into(target, piece.start, piece.stop)
                del view, target
            except BaseException as caught:  # handed to the consumer, which raises it
                error = caught
            self._piece_done(turn, count, error)

    def _next_piece(self) -> tuple[int, Extent] | None:
        """Take the next piece to read; waits for a free buffer; None when the stream is closed."""
        with self._lock:
            while not self._closing:
                free = self._read_turn < self._turn + len(self._buffers) - self._kept
                if free and not self._paused and self._error is None:
                    turn = self._read_turn
                    pieces = self._pieces[turn % len(self._pieces)]
                    if self._read_piece == 0:
                        self._missing[turn] = len(pieces)
                    if not pieces:  # a layer without tensors
                        self._read_turn += 1
                        self._layer_ready.notify_all()
                        continue
                    piece = pieces[self._read_piece]
                    self._read_piece += 1
                    if self._read_piece == len(pieces):
                        self._read_turn, self._read_piece = turn + 1, 0
                    if self._in_flight == 0:
                        self._reading_since = time.perf_counter()
                    self._in_flight += 1
                    return turn, piece
                self._work_ready.wait()
            return None

    def _piece_done(self, turn: int, count: int, error: BaseException | None) -> None:
        with self._lock:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._reading_s += time.perf_counter() - self._reading_since
            self.bytes_read += count
            if error is None:
                self._missing[turn] -= 1
            elif self._error is None:
                # A traceback's frames would keep views of the buffer alive.
                self._error = error.with_traceback(None)
            if self._error is not None or not self._missing[turn] or self._paused:
                self._layer_ready.notify_all()
