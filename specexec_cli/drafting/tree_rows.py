"""The rows of a tree's expanded nodes in the draft model's cache, and what the model said of them.

They lie behind the rows of the committed tokens, in the order of their expansion: row `slot` here
is the cache's prefix + slot. ROOT is the last committed token, whose row is the prefix's last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specexec_cli.drafting.search import ROOT, Ints

if TYPE_CHECKING:
    from torch import Tensor


class TreeRows:
    """Expanded nodes, each with its parent's slot, its token and its rotary position."""

    def __init__(self) -> None:
        self.utilities: dict[int, Tensor] = {}  # slot, or ROOT -> (vocab,), see DraftScorer
        self.positions: Ints = np.zeros(0, dtype=np.int64)
        self._ancestors: NDArray[np.bool_] = np.zeros((0, 0), dtype=bool)  # self included
        self._nodes: list[tuple[int, int]] = []  # by slot: the parent's slot, and the token
        self._slots: dict[tuple[int, int], int] = {}  # the other way round

    def __len__(self) -> int:
        return len(self._nodes)

    def add(
        self, parents: Sequence[int], tokens: Sequence[int], positions: Ints
    ) -> NDArray[np.bool_]:
        """Takes nodes in behind those that are there.

        Args:
            parents: (n,) their slots, or ROOT.
            positions: (n,) rotary.
        Returns:
            (n, slots) which slots each of them attends to.
        """
        old, new = len(self), len(parents)
        ancestors = np.zeros((old + new, old + new), dtype=bool)
        ancestors[:old, :old] = self._ancestors
        for slot, node in enumerate(zip(parents, tokens, strict=True), old):
            if node[0] != ROOT:
                ancestors[slot] = ancestors[node[0]]
            ancestors[slot, slot] = True
            self._nodes.append(node)
            self._slots[node] = slot
        self._ancestors = ancestors
        self.positions = np.concatenate([self.positions, positions])
        return ancestors[old:]

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The slots of a path from the root, as far as its nodes were expanded."""
        path: list[int] = []
        for token in tokens:
            slot = self._slots.get((path[-1] if path else ROOT, token))
            if slot is None:
                break
            path.append(slot)
        return path

    def path(self, slot: int) -> tuple[int, ...]:
        """The tokens from the root to a slot, its own last; none to ROOT."""
        tokens: list[int] = []
        while slot != ROOT:
            slot, token = self._nodes[slot]
            tokens.append(token)
        return tuple(reversed(tokens))
