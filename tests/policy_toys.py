"""Toys for tests of budget policies: texts of known probabilities, and machines of known cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specexec_cli.core import DraftTree, StepResult
from specexec_cli.drafting.classifier import FEATURES
from specexec_cli.drafting.policies import NextTree
from specexec_cli.drafting.search import Expand, Frontier, Search, grow_tree

Signals = Callable[[np.ndarray], np.ndarray]  # see policies.registry
Seconds = Callable[[int, int], float]  # (rows, draft steps) of an iteration


class Text:
    """A text whose every position offers the same choices: the i-th child of any node is the
    target's token with probability `chances[i]`, and the draft model knows it."""

    def __init__(self, chances: list[float], seed: int) -> None:
        self.log_chances = np.log(np.array(chances))
        self.chances = chances
        self.rng = np.random.default_rng(seed)
        self.steps = 0

    def expand(self, frontier: Frontier, width: int) -> tuple[np.ndarray, np.ndarray]:
        self.steps += 1
        count = min(width, len(self.chances))
        shape = (len(frontier.ids), count)
        return (
            np.broadcast_to(self.log_chances[:count], shape),
            np.broadcast_to(np.arange(count), shape),
        )

    def accepted(self, tree: DraftTree) -> int:
        """How many of the tree's nodes the target's tokens lead through."""
        node, count = -1, 0
        while True:
            drawn = self.rng.choice(len(self.chances) + 1, p=[*self.chances, 1 - sum(self.chances)])
            children = np.flatnonzero((tree.parents == node) & (tree.tokens == drawn))
            if len(children) == 0:
                return count
            node, count = int(children[0]), count + 1


def tree_of(expand: Expand, max_depth: int, *, search: Search = grow_tree,
            signals: Signals | None = None, pending: int = 1) -> NextTree:  # fmt: skip
    """What a policy is asked to grow."""
    return NextTree(search=search, expand=expand, max_depth=max_depth,
                    signals=signals or no_signals, pending=pending)  # fmt: skip


def no_signals(ids: np.ndarray) -> np.ndarray:
    return np.zeros((len(ids), FEATURES - 1))


def outcome(tree: DraftTree, accepted: int, draft_s: float, total_s: float) -> StepResult:
    """An iteration that committed `accepted` nodes of the tree and the bonus token."""
    return StepResult(
        tokens=(0,) * (accepted + 1),
        drafted=(True,) * accepted + (False,),
        tree_nodes=len(tree),
        tree_depth=int(tree.depths.max(initial=0)),
        draft_s=draft_s,
        verify_s=total_s - draft_s,
        bytes_streamed=0,
        pending_rows=1,
    )


STREAMED: Seconds = lambda rows, steps: max(1.0, rows / 60) + 0.01 * steps  # noqa: E731
HIDDEN: Seconds = lambda rows, steps: max(1.0, rows / 60)  # noqa: E731
RESIDENT: Seconds = lambda rows, steps: 0.03 + 0.004 * rows + 0.01 * steps  # noqa: E731
STEEP: Seconds = lambda rows, steps: 0.1 + 0.02 * max(0, rows - 8) + 0.01 * steps  # noqa: E731
