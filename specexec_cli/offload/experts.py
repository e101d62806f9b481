"""Reads a mixture's experts one by one from the SSD into equal slots of RAM, and keeps the best.

    consumer:  for batch in store.take(layer, wanted, rows): ...     experts that have arrived
    readers:   read the experts that were asked for, in file order; after them, expected experts

A slot is free, is being read into, or holds an expert. Only readers give slots to experts, under
the lock; the consumer only says which experts it wants. So Ctrl-C, which interrupts the consumer's
thread, cannot leave a slot that holds another expert than the table says. An expert that the
consumer has asked for keeps its slot until the consumer is done with it. If fewer slots are free
than experts are wanted, a slot is read into anew once the consumer is done with its expert.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from torch import Tensor

from specexec_cli.errors import StreamError
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.expert_files import ExpertFiles, ExpertTensors
from specexec_cli.offload.expert_queue import ReadQueue
from specexec_cli.offload.expert_reads import GAP_BYTES, Read
from specexec_cli.offload.expert_scores import ExpertScores
from specexec_cli.offload.expert_slots import SlotTable
from specexec_cli.offload.memory import HugeBuffer
from specexec_cli.offload.reader import PIECE_BYTES, Notice
from specexec_cli.offload.resident import as_blob, check_free

READER_THREADS = 4  # experts are small; the disks that were tried gave the same rate with 1 to 8
_MEND = "Stream whole layers instead: `offload='ssd'`"
_NONE: Mapping[int, int] = MappingProxyType({})

# experts of one layer, each with its tensors by their names in the checkpoint
Batch = list[tuple[int, ExpertTensors]]


class ExpertStore:
    """The experts of all layers; those in slots are handed out at once, others are read.

    One consumer thread. After an aborted pass call restart(); at the end close().
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Sequence[TensorRange]]],
        cap_bytes: int,
        scores: ExpertScores,
        *,
        notice: Notice = lambda text: None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Allocate the slots and open the files; nothing is read yet.

        Args:
            layers: for each layer, for each expert, its tensors; a dense layer has no experts.
            cap_bytes: most bytes that all slots together may take, in whole huge pages.
            scores: what is known about the experts' use; take() adds what is asked for.
            notice: called with one line of text if something will be slower than it could be.
            piece_bytes: most bytes of one read.
        Raises:
            StreamError: a file cannot be opened.
            OutOfMemoryError: the slots do not fit into free memory.
            ValueError: not one expert fits under the cap.
        """
        self.scores = scores
        self.touched = self.hits = 0  # experts asked for so far; of those, already in memory
        self.bytes_read = self.reads = 0  # from the files, and in how many reads
        self.wait_s = 0.0  # during which the consumer waited for a reader
        self.reading_s = 0.0  # during which at least one read was under way
        self.files = ExpertFiles(layers, piece_bytes)
        self.slot_bytes = self.files.slot_bytes
        self.slots = min(cap_bytes // self.slot_bytes, len(self.files))
        if not self.slots:
            raise ValueError(f"no slot of {self.slot_bytes} bytes fits into {cap_bytes}")
        self._threads: list[threading.Thread] = []
        self._buffer: HugeBuffer | None = None
        self._spare = memoryview(mmap.mmap(-1, GAP_BYTES))  # takes the bytes between experts
        self._blob: Tensor | None = None  # the buffer's bytes, from _open() to close()
        self.table = SlotTable(self.slots, len(layers) * self.files.width)
        self._queue = ReadQueue(self.files, self.table, scores)
        self._tensors = [ExpertTensors({}) for _ in range(self.slots)]
        # Reentrant: Python may drop a take() generator anywhere, also where the lock is held, and
        # the dropped generator ends its request.
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._reading, self._began_s = 0, 0.0  # reads under way, and since when
        self._request: object | None = None  # a new object for each take()
        self._error: BaseException | None = None
        self._closing = False
        try:
            self._open(notice)
        except BaseException:
            self.close()
            raise

    def _open(self, notice: Notice) -> None:
        size = self.slots * self.slot_bytes
        check_free(size, f"slots for {self.slots} experts", _MEND)
        self.files.open(notice)
        self._buffer = HugeBuffer(size, "the expert slots", _MEND)
        self._blob = as_blob(self._buffer)
        self._threads = [
            threading.Thread(target=self._read_loop, name=f"specexec-experts-{n}", daemon=True)
            for n in range(READER_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    # The consumer's side

    @property
    def width(self) -> int:
        """Keys per layer; see expert_files.py."""
        return self.files.width

    @property
    def blob(self) -> Tensor:
        """All slots as (bytes,) uint8."""
        assert self._blob is not None, "the store is open"
        return self._blob

    def bytes_of(self, key: int) -> Tensor:
        """(bytes,) uint8: the bytes that were read for an expert that has been handed out."""
        start = self.table.of[key] * self.slot_bytes
        return self.blob[start : start + self.files.n_bytes(key)]

    def elsewhere(self, key: int, held: bool) -> None:
        """Notes whether an expert is held elsewhere as well; if so, its slot is given up first."""
        with self._lock:
            self.table.elsewhere[key] = held

    def take(
        self, layer: int, wanted: Mapping[int, int], rows: int, elsewhere: Mapping[int, int] = _NONE
    ) -> Iterator[Batch]:
        """Yields each wanted expert once, as they arrive: first the experts in slots, then those
        that were read while the consumer was busy with the ones before.

        Args:
            wanted: expert -> rows of the pass that are routed to it.
            rows: all rows of the pass.
            elsewhere: further experts that the pass needs and finds elsewhere -> their rows.
        Yields:
            Some experts with their tensors by name, valid until the next batch is asked for.
        Raises:
            StreamError: an expert could not be read, by file and offset.
        """
        request = object()
        first = layer * self.files.width
        left = dict.fromkeys(first + expert for expert in wanted)
        self.scores.used(layer, [*wanted.items(), *elsewhere.items()], rows)
        self.touched += len(elsewhere)
        self.hits += len(elsewhere)
        try:
            self._ask(request, layer, list(left))
            while left:
                found = self._wait_for_some(left)
                yield [(key - first, self._tensors[slot]) for key, slot in found]
                for key, _ in found:
                    del left[key]
                self._done_with(request, [slot for _, slot in found])
        finally:
            # after Ctrl-C this may run later than restart(), and later than new requests
            if self._request is request:
                self._end_request()

    def _ask(self, request: object, layer: int, keys: Sequence[int]) -> None:
        with self._lock:
            if self._closing or self._request is not None:
                raise RuntimeError("the store is closed, or a request is under way")
            self._request = request
            missing = []
            for key in keys:
                slot = self.table.of.get(key)
                if slot is None:
                    missing.append(key)
                else:
                    self.table.pinned[slot] = True
                    self.hits += int(self.table.ready[slot])
            self.touched += len(keys)
            self._queue.want(layer, missing)
            self._wake()

    def _wait_for_some(self, keys: Collection[int]) -> list[tuple[int, int]]:
        """Waits for at least one of these experts; returns those that are there, and their slots.

        Returns at most half of the slots unless they hold all that is left: readers fill the other
        slots while the consumer computes.
        """
        started = time.perf_counter()
        with self._lock:
            while True:
                if isinstance(self._error, StreamError):
                    raise StreamError(str(self._error))
                if self._error is not None:
                    raise RuntimeError("a reader thread died") from self._error
                slots = ((key, self.table.ready_slot(key)) for key in keys)
                found = [(key, slot) for key, slot in slots if slot is not None]
                if found:
                    self.wait_s += time.perf_counter() - started
                    last = len(found) == len(keys)
                    return found if last else found[: max(1, self.slots // 2)]
                self._arrived.wait()

    def _done_with(self, request: object, slots: Sequence[int]) -> None:
        with self._lock:
            if self._request is request:
                self.table.unpin(slots)
                self._wake()

    def _end_request(self) -> None:
        with self._lock:
            self._queue.want_no_more()
            self.table.unpin(slice(None))
            self._request = self._error = None
            self._wake()

    def _wake(self) -> None:
        """Wakes one reader if there may be something to read; that reader wakes the next.

        Readers that were woken for nothing would take turns with the consumer's arithmetic.
        """
        if self._queue:
            self._work.notify()

    def expect(self, rows: int, visits: int) -> None:
        """A pass begins: experts that it is almost sure to need are read ahead, layer by layer.

        Args:
            rows: rows of each visit of a layer.
            visits: how often the pass visits each layer.
        """
        likely, by_one = self.scores.likely(rows), self.scores.likely(1)
        with self._lock:
            self._queue.expect(likely, by_one, visits)
            self._wake()

    def warm(self) -> None:
        """Begin to read the experts that are worth most into free slots."""
        worth = self.scores.worth.ravel()
        best = [key for key in np.argsort(-worth, kind="stable").tolist() if worth[key] > 0.0]
        chosen = [key for key in best if key in self.files][: self.slots]
        with self._lock:
            self._queue.fill_with(chosen)
            self._wake()

    def restart(self) -> None:
        """Forget the request and the expectations of an aborted pass; experts in slots stay."""
        with self._lock:
            self._queue.expect_nothing()
        self._end_request()

    def close(self) -> None:
        """Stop the readers, close the files, give the memory back. Idempotent."""
        with self._lock:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        self.files.close()
        self._tensors = []
        self._blob, self._spare = None, memoryview(bytearray())
        if self._buffer is not None:
            self._buffer.close()

    # The readers' side

    def _read_loop(self) -> None:
        while (read := self._next_read()) is not None:
            error: BaseException | None = None
            count = 0
            try:
                count = self.files.read(read, self._slots_of(read), self._spare)
            except BaseException as caught:  # handed to the consumer, which raises it
                error = caught
            self._read_done(read, count, error)

    def _slots_of(self, read: Read) -> list[memoryview]:
        """The slot of each part, as bytes."""
        assert self._buffer is not None
        view, size = self._buffer.view, self.slot_bytes
        return [view[part.slot * size : (part.slot + 1) * size] for part in read.parts]

    def _next_read(self) -> Read | None:
        """Takes the next read; waits until there is one; None when the store is closed."""
        with self._lock:
            while not self._closing:
                read = self._queue.next_read(self._request)
                if read is not None:
                    if not self._reading:
                        self._began_s = time.perf_counter()
                    self._reading += 1
                    self._work.notify()  # if there is more to read, another reader goes on with it
                    return read
                self._work.wait()
            return None

    def _read_done(self, read: Read, count: int, error: BaseException | None) -> None:
        with self._lock:
            self.bytes_read += count
            self.reads += 1
            self._reading -= 1
            if not self._reading:
                self.reading_s += time.perf_counter() - self._began_s
            for slot in self._queue.read_done(read, error):
                self._arrive(slot)
            self._wake()  # slots may have become free to take, or reads are to be done again

    def _arrive(self, slot: int) -> None:
        """After a slot's last read: makes the expert's tensors and hands it out, or its error."""
        if not self._queue.has_failed(slot):
            try:
                self._tensors[slot] = self.files.tensors(
                    int(self.table.held[slot]), self.blob, slot * self.slot_bytes
                )
            except BaseException as caught:  # as in _read_loop
                self._queue.fail(slot, caught)
        told = self._queue.arrived(slot, self._request)
        if told is not None:
            self._error = told
        self._arrived.notify_all()
