"""Which expert is in which slot, and which slot is given up next. Knows no bytes and no threads.

A slot is free or belongs to one expert, which is being read into it or is ready. A pinned slot is
in use and is not given up.
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
        self.ready = np.zeros(slots, dtype=np.bool_)  # the slot holds a whole expert
        self.pinned = np.zeros(slots, dtype=np.bool_)  # asked for and still needed
        # by expert: it is held elsewhere as well, so there is no reason to keep it here
        self.elsewhere = np.zeros(experts, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.held)

    def ready_slot(self, expert: int) -> int | None:
        """The slot that holds a whole expert; None if no slot does."""
        slot = self.of.get(expert)
        return slot if slot is not None and self.ready[slot] else None

    def give(self, slot: int, expert: int, *, pinned: bool) -> None:
        """Gives a slot to an expert, which is to be read into it."""
        old = int(self.held[slot])
        if old != FREE:
            del self.of[old]
        self.of[expert] = slot
        self.held[slot] = expert
        self.ready[slot] = False
        self.pinned[slot] = pinned

    def take_back(self, slot: int) -> None:
        """Frees a slot: its expert could not be read."""
        del self.of[int(self.held[slot])]
        self.held[slot] = FREE
        self.pinned[slot] = False

    def unpin(self, slots: Sequence[int] | slice) -> None:
        """Notes that nobody uses these slots any more."""
        self.pinned[slots] = False

    def free(self) -> int | None:
        """A free slot; None if there is none."""
        if len(self.of) == len(self):
            return None
        return int(np.flatnonzero(self.held == FREE)[0])

    def least_worth(self, worth: NDArray[np.float64], kept: NDArray[np.bool_]) -> int | None:
        """The slot of the expert that is least worth keeping; call it when no slot is free.

        Args:
            worth: (experts,), what each expert is worth, 0 or more.
            kept: (experts,), True for an expert that keeps its slot unless it is held elsewhere.
        Returns:
            None if every slot is pinned, being read into, or kept.
        """
        by_slot = worth[self.held]
        by_slot[kept[self.held]] = np.inf
        by_slot[self.elsewhere[self.held]] = -1.0
        by_slot[~self.ready | self.pinned] = np.inf
        slot = int(np.argmin(by_slot))
        return slot if by_slot[slot] < np.inf else None
