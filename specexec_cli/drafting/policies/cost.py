"""The policy cost: as large as pays, and no tree at all where plain decoding is faster.

With E the number of drafted tokens that a tree is expected to commit and T the seconds of its
iteration, it maximises (1 + E) / T. E is the sum of the nodes' probabilities, T a function fitted
to the last iterations, see drafting/iteration_cost.py.
Source: growing a tree while it pays, SpecDec++ (arXiv:2405.19715) for chains; sizes by the
hardware's cost, Sequoia (arXiv:2402.12374).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.drafting.pauses import Pauses
from specexec_cli.drafting.policies.registry import NextTree, policy

if TYPE_CHECKING:
    from specexec_cli.core import StepResult
    from specexec_cli.drafting.iteration_cost import IterationCost
    from specexec_cli.drafting.search import Floats, Frontier, SearchResult

# The budget over the sizes of the first trees that are grown where nothing is known of what rows
# cost, so that there is a comparison.
_FIRST = (2, 8)


_PROMPT_ROWS = 64  # of prompts, in a pass of several texts that is learned from


@policy(
    "cost",
    help="as much as pays in tokens/s; the budget is then twice the pair's unless given",
    methods=("specexec", "suffix"),  # those that search by falling probability
    needs="cost",
)
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
        self._texts = self._pending = 1  # of the pass, see NextTree
        self._prompt_s = 0.0  # what rows of prompts take in this pass, whatever the tree
        self._probing = False  # this tree tries a step and nodes more than seem to pay
        self._probed = False  # and has tried the step
        self._drawn: Floats | None = None  # probabilities of the nodes under way
        self._known = 0  # nodes before their children
        self._tree_expects = 0.0
        self._doubted = False  # the tree is the best there is, and expected to be slower than none
        self._pauses = Pauses()
        self._compilations = 0  # of kernels, before this iteration

    @property
    def _trust(self) -> float:
        return self._accepted / self._expected

    def grow(self, next_tree: NextTree) -> SearchResult:
        """See BudgetPolicy; the search is the best-first one."""
        import numpy as np
        from specexec_kernels import cpu_jit

        from specexec_cli.drafting.search import SearchResult

        self._compilations = cpu_jit.compilations()
        self._texts, self._pending = next_tree.texts, next_tree.pending
        before = np.array([float(self._texts), float(max(self._texts, self._pending))])
        plain_s, pending_s = self._cost.seconds(before, 0).tolist()
        self._prompt_s = pending_s - plain_s
        if self._pauses.goes_without(plain_s):
            return SearchResult(DraftTree.empty(), np.zeros(0, dtype=np.int64))
        self._steps, self._drawn = 1, None  # the root's children take a step
        self._iteration += 1
        self._probing, self._probed = self._iteration % self._PROBE == 0, False
        result = next_tree.found(self._tree, self)
        self._tree_expects = float(np.exp(result.tree.log_probs).sum())
        if len(result.tree):
            _, rate = self._best(result.tree.log_probs, self._steps)
            self._doubted = rate * plain_s < self._texts
        return result

    def goes_on(self, log_probs: Floats, frontier: Frontier) -> bool:
        """Whether one more draft step is expected to pay."""
        import numpy as np

        chosen = frontier.ids
        _, now = self._best(log_probs, self._steps)
        if self._drawn is not None:
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
            size = math.ceil(by * size)  # the search keeps to the budget
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
        import numpy as np

        most = min(self._room(), len(log_probs))
        falling = -np.sort(-log_probs)[:most]
        expected = self._trust * np.cumsum(np.exp(falling))
        rows = self._pending + np.arange(1.0, most + 1.0)
        # a tree that rides with a prompt has to be worth its own time, not the prompt's as well
        rates = (self._texts + expected) / (self._cost.seconds(rows, steps) - self._prompt_s)
        best = int(np.argmax(rates))
        return best + 1, float(rates[best])

    def observe(self, step: StepResult) -> None:
        """See BudgetPolicy. A pass that carried a prompt says nothing about later ones.

        Among several texts a short one does: where texts come and go, few passes carry none. Nor
        does an iteration in which kernels were compiled, which happens once on a machine.
        """
        from specexec_kernels import cpu_jit

        if cpu_jit.compilations() > self._compilations:
            return
        if step.pending_rows > self._texts + (_PROMPT_ROWS if self._texts > 1 else 0):
            return
        tokens = 1.0 + self._trust * self._tree_expects / self._texts
        self._pauses.observe(step, tokens, self._doubted)
        if step.tree_nodes == 0:
            return
        self._accepted = self._DECAY * self._accepted + sum(step.drafted)
        self._expected = self._DECAY * self._expected + self._tree_expects
        rows = step.tree_nodes + step.pending_rows
        self._cost.observe(
            rows, self._steps, step.draft_s, step.draft_s + step.verify_s, step.read_s
        )
