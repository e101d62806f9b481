"""Which expert is in which slot, and which slot is given up next. Knows no bytes and no threads.

A slot is free, or of one expert: being read, or ready. A pinned one is in use and is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FREE = -1


class SlotTable:
    """Slots by expert and experts by slot; the caller holds the lock."""

    def __init__(self, slots: int, experts: int) -> None:
        self.of: dict[int, int] = {}  # expert -> slot, ready or being read
        self.held: NDArray[np.int64] = np.full(slots, FREE)  # slot -> expert
        self.ready = np.zeros(slots, dtype=np.bool_)  # holds all of an expert
        self.pinned = np.zeros(slots, dtype=np.bool_)  # asked for, and not done with
        # experts that are held elsewhere as well: no reason to keep them here
        self.elsewhere = np.zeros(experts, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.held)

    def ready_slot(self, expert: int) -> int | None:
        """The slot that holds all of an expert."""
        slot = self.of.get(expert)
        return slot if slot is not None and self.ready[slot] else None

    def give(self, slot: int, expert: int, *, pinned: bool) -> None:
        """The slot is the expert's from now on, which is to be read into it."""
        old = int(self.held[slot])
        if old != FREE:
            del self.of[old]
        self.of[expert] = slot
        self.held[slot] = expert
        self.ready[slot] = False
        self.pinned[slot] = pinned

    def take_back(self, slot: int) -> None:
        """The slot is free: its expert could not be read."""
        del self.of[int(self.held[slot])]
        self.held[slot] = FREE
        self.pinned[slot] = False

    def unpin(self, slots: Sequence[int] | slice) -> None:
        """Nobody uses these any more."""
        self.pinned[slots] = False

    def free(self) -> int | None:
        """A slot that nothing is in."""
        if len(self.of) == len(self):
            return None
        return int(np.flatnonzero(self.held == FREE)[0])

    def least_worth(self, worth: NDArray[np.float64], kept: NDArray[np.bool_]) -> int | None:
        """The slot whose expert is least worth keeping, of a table without free slots.

        Args:
            worth: by expert, 0 or more.
            kept: by expert, whether it is not to be given up, unless it is held elsewhere as well.
        """
        by_slot = worth[self.held]
        by_slot[kept[self.held]] = np.inf
        by_slot[self.elsewhere[self.held]] = -1.0
        by_slot[~self.ready | self.pinned] = np.inf
        slot = int(np.argmin(by_slot))
        return slot if by_slot[slot] < np.inf else None
