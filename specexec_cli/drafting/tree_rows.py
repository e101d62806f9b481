"""The rows of a tree's expanded nodes in the draft model's cache, and the model's results for them.

They are after the rows of the committed tokens, in the order of expansion: slot s here is the
cache's slot prefix + s. ROOT stands for the last committed token, in the prefix's last slot.
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
        self.utilities: dict[int, Tensor] = {}  # by slot or ROOT: (vocab,), see DraftScorer
        self.positions: Ints = np.zeros(0, dtype=np.int64)
        self._ancestors: NDArray[np.bool_] = np.zeros((0, 0), dtype=bool)  # self included
        self._nodes: list[tuple[int, int]] = []  # by slot: the parent's slot, and the token
        self._slots: dict[tuple[int, int], int] = {}  # the slot by the parent's slot and the token

    def __len__(self) -> int:
        return len(self._nodes)

    def add(
        self, parents: Sequence[int], tokens: Sequence[int], positions: Ints
    ) -> NDArray[np.bool_]:
        """Appends nodes.

        Args:
            parents: (n,) slots of the parents, or ROOT.
            tokens: (n,) the nodes' tokens.
            positions: (n,) the nodes' rotary positions.
        Returns:
            (n, slots) bool, True = attend.
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
        """The slots of the path with these tokens from the root, as far as it was expanded."""
        path: list[int] = []
        for token in tokens:
            slot = self._slots.get((path[-1] if path else ROOT, token))
            if slot is None:
                break
            path.append(slot)
        return path

    def path(self, slot: int) -> tuple[int, ...]:
        """The tokens of the path from the root to a slot, its own token last; empty for ROOT."""
        tokens: list[int] = []
        while slot != ROOT:
            slot, token = self._nodes[slot]
            tokens.append(token)
        return tuple(reversed(tokens))
