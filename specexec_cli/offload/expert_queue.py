"""Decides which expert is read next, and into which slot. Knows no threads.

Experts that the pass has asked for come first; then those that it will likely ask for, in the order
of its layers; last those that earlier sessions used most, which go into free slots only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specexec_cli.offload.expert_files import ExpertFiles
from specexec_cli.offload.expert_reads import Part, Read
from specexec_cli.offload.expert_scores import ExpertScores, Floats
from specexec_cli.offload.expert_slots import SlotTable

LIKELY = 0.9  # probability of being needed from which an expert is read before it is asked for
_SOON = 1e9  # more than any worth; raises experts that the pass is expected to ask for
# All missing experts of a layer are read ahead if a pass is expected to need this share of their
# bytes: the bytes read in vain then come to at most a twentieth of the bytes needed.
WHOLE = 1.0 / 1.05
# Most bytes and experts of neighbours that are asked for together: the bytes give each of four
# readers a piece, and preadv takes so few experts (it takes at most 1,024 places).
RUN_BYTES = 32 << 20
_RUN_EXPERTS = 64


class ReadQueue:
    """Experts that are to be read, and those that are being read; the caller holds the lock."""

    def __init__(self, files: ExpertFiles, table: SlotTable, scores: ExpertScores) -> None:
        """Nothing is to be read yet; reads will go from `files` into the slots of `table`."""
        self._files, self._table, self._scores = files, table, scores
        self._sizes = np.array([files.n_bytes(key) for key in range(scores.counts.size)])
        self._missing = [0] * len(table)  # by slot: parts not read yet
        self._failed: list[BaseException | None] = [None] * len(table)
        self._read_for: list[object | None] = [None] * len(table)  # by slot: the request, if any
        # What the rest of the present pass may need. By expert: the probability that the pass asks
        # for it, the part of the probability that rows after the first add, and whether the expert
        # is expected. By layer: the visits left.
        self._likely: Floats = np.zeros(scores.counts.size)
        self._more: Floats = np.zeros(scores.counts.size)
        self._sure = np.zeros(scores.counts.size, dtype=np.bool_)
        self._visits: NDArray[np.int64] = np.zeros(len(scores.counts), dtype=np.int64)
        self._wanted: deque[int] = deque()  # asked for, and without a slot
        self._expected: deque[int] = deque()
        self._usual: deque[int] = deque()
        self._reads: deque[Read] = deque()  # reads of experts that were asked for
        self._early: deque[Read] = deque()  # reads of other experts

    def __bool__(self) -> bool:
        """Whether there may be something to read."""
        return bool(self._reads or self._early or self._wanted or self._expected or self._usual)

    def want(self, layer: int, keys: Iterable[int]) -> None:
        """A visit of a layer begins; it needs these experts, which are in no slot.

        A visit asks for all its experts at once, and layers come in order. So the experts of
        earlier layers, and of this layer if this is its last visit, are no longer expected.
        """
        self._visits[:layer] = 0
        self._visits[layer] = max(0, self._visits[layer] - 1)
        done = layer if self._visits[layer] else layer + 1
        self._forget(done * self._files.width)
        self._wanted.extend(self._files.in_order(keys))

    def _forget(self, stop: int) -> None:
        """Notes that the rest of the pass needs no expert with a key below `stop`."""
        self._likely[:stop] = self._more[:stop] = 0.0
        self._sure[:stop] = False

    def want_no_more(self) -> None:
        """Nobody waits any more for the experts that were asked for."""
        self._wanted.clear()

    def expect(self, likely: Floats, by_one: Floats, visits: int) -> None:
        """A pass begins.

        Args:
            likely: (layers, experts), the probability that the pass asks for each expert.
            by_one: (layers, experts), the same for a pass of one row.
            visits: how often this pass visits each layer.
        """
        self.expect_nothing()
        self._likely, self._more = likely.flatten(), (likely - by_one).flatten()
        self._visits[:] = visits
        needed = (likely >= LIKELY) | self._read_whole(likely)
        for layer in np.flatnonzero(needed.any(axis=1)).tolist():
            chosen = layer * self._files.width + np.flatnonzero(needed[layer])
            keys = self._files.in_order(chosen[~self._table.elsewhere[chosen]].tolist())
            self._expected.extend(keys)
            self._sure[keys] = True

    def _read_whole(self, likely: Floats) -> NDArray[np.bool_]:
        """(layers, experts) bool: the missing experts of layers to be read whole; see WHOLE."""
        missing = ~self._table.elsewhere
        missing[list(self._table.of)] = False
        sizes = np.where(missing, self._sizes, 0).reshape(likely.shape)
        exactly, all_of_them = (likely * sizes).sum(axis=1), sizes.sum(axis=1)
        whole: NDArray[np.bool_] = (exactly >= WHOLE * all_of_them)[:, None] & (sizes > 0)
        return whole

    def expect_nothing(self) -> None:
        """No pass is under way."""
        self._expected.clear()
        self._forget(len(self._sure))

    def fill_with(self, keys: Iterable[int]) -> None:
        """Lets these experts be read into free slots."""
        self._usual.extend(self._files.in_order(keys))

    def next_read(self, request: object | None) -> Read | None:
        """The next read for the request under way or, if there is none, one to read ahead.

        Returns:
            None if there is nothing to read, or no slot to read it into.
        """
        while not self._reads and self._begin_run(self._wanted, request):
            pass
        if self._reads:
            return self._reads.popleft()
        while not self._early:
            if not (self._begin_run(self._expected, None) or self._begin_run(self._usual, None)):
                return None
        return self._early.popleft()

    def _begin_run(self, queue: deque[int], request: object | None) -> bool:
        """Gives slots to a queue's next expert and its neighbours; False if none gets a slot."""
        run: list[int] = []
        parts: list[Part] = []
        while (key := self._upcoming(queue)) is not None and self._goes_on(run, key):
            slot = self._free_slot(queue)
            if slot is None:
                break
            queue.popleft()
            self._table.give(slot, key, pinned=queue is self._wanted)
            pieces = self._files.pieces(key, slot)
            self._failed[slot], self._read_for[slot] = None, request
            self._missing[slot] = len(pieces)
            run.append(key)
            parts += pieces
        reads = self._reads if queue is self._wanted else self._early
        reads.extend(self._files.joined(parts))
        return bool(run)

    def _goes_on(self, run: list[int], key: int) -> bool:
        """Whether an expert joins a run of neighbours of its layer that are asked for together.

        A run takes at most half of the slots: the consumer computes some experts while others are
        read.
        """
        if not run:
            return True
        most = min(_RUN_EXPERTS, len(self._table) // 2)
        n_bytes = int(self._sizes[[*run, key]].sum())
        near = self._files.neighbours(run[-1], key)
        return near and len(run) < most and n_bytes <= RUN_BYTES

    def _upcoming(self, queue: deque[int]) -> int | None:
        """The first expert of a queue that is still to be read."""
        while queue and self._is_done(queue):
            queue.popleft()
        return queue[0] if queue else None

    def _is_done(self, queue: deque[int]) -> bool:
        """Whether a queue's next expert has a slot, or is no longer expected."""
        unexpected = queue is self._expected and not self._sure[queue[0]]
        return queue[0] in self._table.of or unexpected

    def _free_slot(self, queue: deque[int]) -> int | None:
        """A slot for a queue's next expert: a free one, or that of the expert least worth keeping.

        An expert that is read before it is asked for never replaces one that the rest of the pass
        may need: bytes would be read twice to have others a little sooner.

        Returns:
            None if no slot may be taken.
        """
        free = self._table.free()
        if free is not None or queue is self._usual:
            return free
        worth = self._scores.worth.ravel() + self._more
        if queue is self._expected:
            return self._table.least_worth(worth, self._sure | (self._likely > 1.0 - LIKELY))
        # experts that the pass will need soon are worth more than those it will need late
        layers = np.arange(len(worth)) // self._files.width
        worth += _SOON * self._sure * (layers[-1] + 1 - layers)
        return self._table.least_worth(worth, np.zeros_like(self._sure))

    def read_done(self, read: Read, error: BaseException | None) -> list[int]:
        """Notes that a read has ended or failed; returns the slots for which it was the last read.

        A failed read of several parts is repeated for each part alone, so that an expert with
        readable bytes does not fail with the others.
        """
        if error is not None and len(read.parts) > 1:
            self._reads.extendleft(reversed(read.alone()))
            return []
        ended = []
        for part in read.parts:
            self._missing[part.slot] -= 1
            if error is not None:
                self.fail(part.slot, error)
            if not self._missing[part.slot]:
                ended.append(part.slot)
        return ended

    def fail(self, slot: int, error: BaseException) -> None:
        """Notes that a read into the slot has failed, so that it will hold no expert."""
        # a traceback's frames would keep views of the buffer alive
        self._failed[slot] = error.with_traceback(None)

    def has_failed(self, slot: int) -> bool:
        """Whether one of the slot's reads has failed."""
        return self._failed[slot] is not None

    def arrived(self, slot: int, request: object | None) -> BaseException | None:
        """Notes that a slot's last read has ended: its expert is ready, or its slot is free again.

        Returns:
            The error, if the read was begun for the request that is under way and still waits for
            the expert. If that request waits for an expert that was read for nobody, or for an
            aborted pass, the expert is read again instead.
        """
        failed, self._failed[slot] = self._failed[slot], None
        if failed is None:
            self._table.ready[slot] = True
            return None
        pinned, told = bool(self._table.pinned[slot]), None
        if pinned and self._read_for[slot] is not request:
            self._wanted.appendleft(int(self._table.held[slot]))
        elif pinned:
            told = failed
        self._table.take_back(slot)
        return told
