"""How large the next draft tree should be. A policy changes how many tokens a pass settles and
what it costs, never which tokens: those are the target's own draws.

- fixed: budget, depth and batch as given.
- heuristic: transformers' schedule for assisted generation (`num_assistant_tokens_schedule=
  "heuristic"`): two tokens deeper after a tree whose deepest level was reached, one less otherwise.
- disco: as deep as a classifier that was trained for the pair finds promising, see disco.py.
- oracle: a chain exactly as long as the target's own text agrees with, which must be known: the
  bound for every policy (Mamou et al., arXiv:2405.04304, section 2).
- cost: as large as pays. With E the number of drafted tokens that a tree is expected to commit and
  T the seconds of its iteration, it maximises (1 + E) / T. E is the sum of the nodes'
  probabilities, T a function fitted to the last iterations, see iteration_cost.py.
  Growing a tree while it pays: SpecDec++ (arXiv:2405.19715) for chains; sizes by the hardware's
  cost: Sequoia (arXiv:2402.12374).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from specexec_cli.config import TreeConfig
from specexec_cli.core import StepResult
from specexec_cli.drafting.iteration_cost import IterationCost
from specexec_cli.drafting.search import (
    Expand,
    Floats,
    Frontier,
    Ints,
    Search,
    SearchResult,
)

# ids of expanded nodes (n,) -> their children's 10 highest probabilities, falling, and the entropy
# of all in nats (n, 11)
Signals = Callable[[Ints], Floats]


# The budget over the sizes of the first trees that `cost` grows where nothing is known of what
# rows cost, so that there is a comparison.
_FIRST = (2, 8)


class BudgetPolicy(Protocol):
    """Grows each tree to the size it finds right, and learns from what became of it."""

    def grow(
        self, search: Search, expand: Expand, max_depth: int, signals: Signals, pending: int = 1
    ) -> SearchResult:
        """The next tree, of at most the budget and depth that were given.

        Args:
            search: the method's own.
            expand: the draft model.
            max_depth: longest path that could still be committed.
            signals: what the draft model said of nodes that were expanded.
            pending: committed rows that the pass will carry besides the tree.
        """

    def observe(self, step: StepResult) -> None:
        """What the last tree brought and cost."""


class Fixed:
    """Every tree as large as it may be."""

    def __init__(self, tree: TreeConfig) -> None:
        self._tree = tree

    def grow(
        self, search: Search, expand: Expand, max_depth: int, signals: Signals, pending: int = 1
    ) -> SearchResult:
        """See BudgetPolicy."""
        return search(expand, self._tree, min(max_depth, self._tree.max_depth), None)

    def observe(self, step: StepResult) -> None:
        """See BudgetPolicy."""


class Heuristic:
    """Depth by transformers' schedule; a tree gets its share of the budget with it."""

    _START = 5  # tokens

    def __init__(self, tree: TreeConfig) -> None:
        self._tree = tree
        self._depth = min(self._START, tree.max_depth)

    def grow(
        self, search: Search, expand: Expand, max_depth: int, signals: Signals, pending: int = 1
    ) -> SearchResult:
        """See BudgetPolicy."""
        full = self._tree
        budget = max(self._depth, full.budget * self._depth // full.max_depth)
        tree = replace(full, budget=budget, max_depth=self._depth)
        return search(expand, tree, min(max_depth, self._depth), None)

    def observe(self, step: StepResult) -> None:
        """See BudgetPolicy."""
        if step.tree_depth:
            reached = sum(step.drafted) == step.tree_depth
            self._depth = self._depth + 2 if reached else self._depth - 1
            self._depth = min(max(self._depth, 1), self._tree.max_depth)


class Oracle:
    """Chains that end at the first token which is not the target's."""

    def __init__(self, tree: TreeConfig, continuation: Sequence[int]) -> None:
        self._tree = tree
        self._continuation = list(continuation)  # from the next token on

    def grow(
        self, search: Search, expand: Expand, max_depth: int, signals: Signals, pending: int = 1
    ) -> SearchResult:
        """See BudgetPolicy; the search is one of single paths."""
        return search(expand, self._tree, min(max_depth, self._tree.max_depth), self)

    def goes_on(self, log_probs: Floats, frontier: Frontier) -> bool:
        """Whether the path's last token is right, as all before it were."""
        depth, token = int(frontier.depths[-1]), int(frontier.tokens[-1])
        return self._continuation[depth - 1 : depth] == [token]

    def size(self, log_probs: Floats) -> int:
        """All of them."""
        return len(log_probs)

    def observe(self, step: StepResult) -> None:
        """See BudgetPolicy."""
        self._continuation = self._continuation[len(step.tokens) :]


class Cost:
    """The tree with the most tokens per second, expected.

    The probabilities of a tree's nodes are scaled so that their sum has been right lately. Rows
    beyond the largest pass so far are tried by halves more at a time: what they cost is not known.
    The first tree is as large as a measured prior says.
    """

    _DECAY = 0.97  # the last thirty trees decide
    _PRIOR = 10.0  # tokens that are taken to have come as expected
    _STRETCH = 1.5
    _PROBE = 16  # every so many trees one asks what the others cannot tell
    _PROBED = (1.5, 0.5, 1.2)  # by being so many times as large as seems right

    def __init__(self, tree: TreeConfig, cost: IterationCost) -> None:
        self._tree = tree
        self._cost = cost
        self._accepted = self._expected = self._PRIOR  # running sums
        self._caught = 0.7  # share of an expanded node's probability that its best child has
        self._iteration = self._steps = 0
        self._pending = 1
        self._probing = False  # this tree tries a step and nodes more than seem to pay
        self._probed = False  # and has tried the step
        self._drawn: Floats = np.zeros(0)  # probabilities of the nodes under way
        self._known = 0  # nodes before their children
        self._tree_expects = 0.0

    @property
    def _trust(self) -> float:
        return self._accepted / self._expected

    def grow(
        self, search: Search, expand: Expand, max_depth: int, signals: Signals, pending: int = 1
    ) -> SearchResult:
        """See BudgetPolicy; the search is the best-first one."""
        self._pending = pending
        self._steps, self._drawn = 1, np.zeros(0)
        self._iteration += 1
        self._probing, self._probed = self._iteration % self._PROBE == 0, False
        depth = min(max_depth, self._tree.max_depth)
        result = search(expand, self._tree, depth, self)
        self._tree_expects = float(np.exp(result.tree.log_probs).sum())
        return result

    def goes_on(self, log_probs: Floats, frontier: Frontier) -> bool:
        """Whether one more draft step is expected to pay."""
        chosen = frontier.ids
        _, now = self._best(log_probs, self._steps)
        if len(self._drawn):
            best = -np.sort(-np.exp(log_probs[self._known :]))[: len(self._drawn)]
            share = float(best.sum() / self._drawn.sum())
            self._caught += 0.2 * (min(max(share, 0.05), 1.0) - self._caught)
        self._drawn, self._known = np.exp(log_probs[chosen]), len(log_probs)
        # as if each node had its best child alone
        children = log_probs[chosen] + np.log(self._caught)
        _, then = self._best(np.concatenate([log_probs, children]), self._steps + 1)
        if then <= now:
            if self._probed or not self._probing:
                return False
            self._probed = True
        self._steps += 1
        return True

    def size(self, log_probs: Floats) -> int:
        """How many of these nodes, the most probable ones, to verify."""
        size, _ = self._best(log_probs, self._steps)
        if self._probing:
            by = self._PROBED[self._iteration // self._PROBE % len(self._PROBED)]
            size = min(math.ceil(by * size), self._tree.budget, len(log_probs))
        return size

    def _room(self) -> int:
        """Nodes that a tree may have by now."""
        tried = self._cost.iterations
        if self._cost.prior is None and tried < len(_FIRST):
            return max(1, self._tree.budget // _FIRST[tried])
        if tried == 0:
            return self._tree.budget
        return min(self._tree.budget, int(self._STRETCH * self._cost.most_rows))

    def _best(self, log_probs: Floats, steps: int) -> tuple[int, float]:
        """The number of nodes with the most tokens per second, and that rate."""
        most = min(self._room(), len(log_probs))
        falling = -np.sort(-log_probs)[:most]
        expected = self._trust * np.cumsum(np.exp(falling))
        rows = self._pending + np.arange(1.0, most + 1.0)
        rates = (1.0 + expected) / self._cost.seconds(rows, steps)
        best = int(np.argmax(rates))
        return best + 1, float(rates[best])

    def observe(self, step: StepResult) -> None:
        """See BudgetPolicy. A pass that carried a prompt says nothing about later ones."""
        if step.pending_rows > 1 or step.tree_nodes == 0:
            return
        self._accepted = self._DECAY * self._accepted + sum(step.drafted)
        self._expected = self._DECAY * self._expected + self._tree_expects
        rows = step.tree_nodes + step.pending_rows
        self._cost.observe(rows, self._steps, step.draft_s, step.draft_s + step.verify_s)
