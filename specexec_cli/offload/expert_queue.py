"""What the readers of experts do next: which expert is read, into which slot. Knows no threads.

Experts that were asked for come first, then those that the pass is likely to ask for, in the order
of its layers, and last those that earlier sessions used most, for free slots alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specexec_cli.offload.expert_files import ExpertFiles
from specexec_cli.offload.expert_scores import ExpertScores, Floats
from specexec_cli.offload.expert_slots import SlotTable
from specexec_cli.offload.reader import Extent

LIKELY = 0.9  # an expert that a pass is so likely to need is read before it is asked for


class ReadQueue:
    """Experts that are to be read, and those that are being read; the caller holds the lock."""

    def __init__(self, files: ExpertFiles, table: SlotTable, scores: ExpertScores) -> None:
        """Into the slots of `table`; nothing is to be read yet."""
        self._files, self._table, self._scores = files, table, scores
        self._missing = [0] * len(table)  # pieces not there yet
        self._failed: list[BaseException | None] = [None] * len(table)
        self._read_for: list[object | None] = [None] * len(table)  # the request, if there was one
        # by expert, how often the present pass is still expected to ask for it
        self._ahead: NDArray[np.int64] = np.zeros(scores.counts.size, dtype=np.int64)
        self._wanted: deque[int] = deque()  # asked for, and without a slot
        self._expected: deque[int] = deque()
        self._usual: deque[int] = deque()
        self._pieces: deque[tuple[int, Extent]] = deque()  # slot and piece

    def __bool__(self) -> bool:
        """Whether there may be something to read."""
        return bool(self._pieces or self._wanted or self._expected or self._usual)

    def want(self, layer: int, keys: Iterable[int]) -> None:
        """A visit of a layer begins, which lacks these experts.

        What a visit does not ask for it will not ask for later, nor will a later layer ask for what
        earlier ones have.
        """
        first = layer * self._files.width
        self._ahead[:first] = 0
        visited = self._ahead[first : first + self._files.width]
        np.maximum(visited - 1, 0, out=visited)
        self._wanted.extend(self._files.in_order(keys))

    def want_no_more(self) -> None:
        """Nobody waits for what was asked for."""
        self._wanted.clear()

    def expect(self, likely: Floats, visits: int) -> None:
        """A pass begins.

        Args:
            likely: how likely each expert is to be asked for, (layers, experts).
            visits: of each layer in this pass.
        """
        self.expect_nothing()
        almost_sure = likely >= LIKELY
        for layer in np.flatnonzero(almost_sure.any(axis=1)).tolist():
            chosen = layer * self._files.width + np.flatnonzero(almost_sure[layer])
            keys = self._files.in_order(chosen[~self._table.elsewhere[chosen]].tolist())
            self._expected.extend(keys)
            self._ahead[keys] = visits

    def expect_nothing(self) -> None:
        """No pass is under way."""
        self._expected.clear()
        self._ahead[:] = 0

    def fill_with(self, keys: Iterable[int]) -> None:
        """Free slots may take these experts."""
        self._usual.extend(self._files.in_order(keys))

    def next_piece(self, request: object | None) -> tuple[int, Extent] | None:
        """The next slot and piece to read for the request that is under way.

        Returns:
            None if there is nothing to read, or no slot for it.
        """
        while not self._pieces:
            if not self._give_slot(request):
                return None
        return self._pieces.popleft()

    def _give_slot(self, request: object | None) -> bool:
        """A slot for the next expert to read; False if there is none to read, or no slot."""
        for queue in (self._wanted, self._expected, self._usual):
            while queue and self._is_done(queue):
                queue.popleft()
        queue = self._wanted or self._expected or self._usual
        slot = self._free_slot(queue) if queue else None
        if slot is None:
            return False
        key = queue.popleft()
        asked_for = queue is self._wanted
        self._table.give(slot, key, pinned=asked_for)
        self._failed[slot] = None
        self._read_for[slot] = request if asked_for else None
        self._missing[slot] = len(self._files.pieces[key])
        self._pieces.extend((slot, piece) for piece in self._files.pieces[key])
        return True

    def _is_done(self, queue: deque[int]) -> bool:
        """Whether a queue's next expert has a slot, or is no longer expected."""
        unexpected = queue is self._expected and not self._ahead[queue[0]]
        return queue[0] in self._table.of or unexpected

    def _free_slot(self, queue: deque[int]) -> int | None:
        """A free slot, or that of the expert which is least worth keeping, for a queue's next."""
        free = self._table.free()
        if free is not None or queue is self._usual:
            return free
        # what the pass will need soon is worth more than what it will need late
        layers = np.arange(len(self._ahead)) // self._files.width
        soon = (self._ahead > 0) * (layers[-1] + 1 - layers)
        scores = self._scores.counts.ravel()
        return self._table.least_worth(scores, soon, also_soon=queue is self._wanted)

    def piece_done(self, slot: int, error: BaseException | None) -> bool:
        """One piece of an expert has been read, or has failed; whether it was the last one."""
        self._missing[slot] -= 1
        if error is not None:
            # a traceback's frames would keep views of the buffer alive
            self._failed[slot] = error.with_traceback(None)
        return not self._missing[slot]

    def arrived(self, slot: int, request: object | None) -> BaseException | None:
        """The last piece of an expert is done with: it is ready, or its slot is free again.

        Returns:
            what failed, where the request that is under way waits for it. A read that was begun for
            nobody, or for a pass that was aborted, is tried again.
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
