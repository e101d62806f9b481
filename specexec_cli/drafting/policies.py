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
  probabilities, T a function fitted to the last iterations: rows are free as long as their
  arithmetic hides behind the stream, and draft steps as far as the stream goes on meanwhile.
  Growing a tree while it pays: SpecDec++ (arXiv:2405.19715) for chains; sizes by the hardware's
  cost: Sequoia (arXiv:2402.12374).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from specexec_cli.config import TreeConfig
from specexec_cli.core import StepResult
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


# The budget over the sizes of the first trees that `cost` grows, so that there is a comparison.
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
        self._continuation = continuation  # from the next token on

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


class IterationCost:
    """Seconds of an iteration by rows of its pass and draft steps, fitted to the last ones.

        seconds = base + row_s * max(0, rows - knee) + step_s * steps

    Below the knee the pass waits for weights whatever its rows. A draft step costs what it adds to
    the whole iteration, less than it takes where the stream goes on meanwhile.
    """

    _MEMORY = 128  # iterations
    _KNEES = 24  # that are tried
    _BETTER = 0.8  # a knee must fit this much better than none, or than a lower one
    _NOISE = 0.01  # of an iteration's time: fits that are closer are equally good
    _DOUBT = 0.5  # how many iterations the prior of a draft step counts as

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int, float, float]] = deque(maxlen=self._MEMORY)
        self._fit = (1.0, 0.0, 0.0, 0.0)  # base, row_s, knee, step_s
        self.most_rows = 0

    @property
    def seen(self) -> list[tuple[int, int, float, float]]:
        """The iterations remembered: rows, steps, seconds of drafting, seconds of all."""
        return list(self._seen)

    def observe(self, rows: int, steps: int, draft_s: float, total_s: float) -> None:
        """One iteration."""
        self.most_rows = max(self.most_rows, rows)
        self._seen.append((rows, steps, draft_s, total_s))
        if len(self._seen) < len(_FIRST):
            return  # nothing to compare
        rows_seen, steps_seen, drafts_s, totals_s = np.array(self._seen, dtype=np.float64).T
        per_step = float(drafts_s.sum() / max(steps_seen.sum(), 1.0))
        best, self._fit = np.inf, (1.0, 0.0, 0.0, 0.0)
        noise = float(np.square(self._NOISE * totals_s).sum())
        # where nothing tells, rows are taken to cost the same from the first one on: fewer are
        # then tried, and tell
        knees = np.geomspace(rows_seen.min(), rows_seen.max(), self._KNEES)
        for knee in (0.0, *knees):
            beyond = np.maximum(0.0, rows_seen - knee)
            # the prior: a step costs what it takes
            features = np.column_stack([np.ones_like(beyond), beyond, steps_seen])
            weight = np.sqrt(self._DOUBT) * max(float(steps_seen.mean()), 1.0)
            features = np.vstack([features, [0.0, 0.0, weight]])
            wanted = np.append(totals_s, weight * per_step)
            found, *_ = np.linalg.lstsq(features, wanted, rcond=None)
            base, row_s, step_s = (
                max(float(found[0]), 1e-9),
                max(float(found[1]), 0.0),
                min(max(float(found[2]), 0.0), per_step),
            )
            told = base + row_s * beyond + step_s * steps_seen
            error = noise + float(np.square(told - totals_s).sum())
            # no knee at all is the first of them, and is left for a clearly better one only
            if error < best * (self._BETTER if self._fit[2] == 0.0 else 1.0):
                best, self._fit = error, (base, row_s, float(knee), step_s)

    @property
    def iterations(self) -> int:
        """How many are remembered."""
        return len(self._seen)

    def seconds(self, rows: Floats, steps: int) -> Floats:
        """Of iterations over `rows` rows, (n,)."""
        base, row_s, knee, step_s = self._fit
        return base + row_s * np.maximum(0.0, rows - knee) + step_s * steps


class Cost:
    """The tree with the most tokens per second, expected.

    The probabilities of a tree's nodes are scaled so that their sum has been right lately. Rows
    beyond the largest pass so far are tried by halves more at a time: what they cost is not known.
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
        if tried < len(_FIRST):
            return max(1, self._tree.budget // _FIRST[tried])
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
