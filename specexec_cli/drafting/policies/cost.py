"""The policy cost: trees as large as pays, and none where plain decoding is faster.

It maximises (1 + E) / T. E is the expected number of drafted tokens that a tree commits, the sum of
its nodes' probabilities; T is the seconds of the iteration, fitted to recent iterations
(drafting/iteration_cost.py).

Source: growing a draft while it pays: SpecDec++, arXiv:2405.19715, for chains; sizes by the
hardware's cost: Sequoia, arXiv:2402.12374.
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

# The first trees have the budget divided by these numbers of nodes, if nothing is known of what
# rows cost: two sizes to compare.
_FIRST = (2, 8)


_PROMPT_ROWS = 64  # the most prompt rows of a pass of several texts that is still learned from


@policy(
    "cost",
    help="as much as pays in tokens/s; the budget is then twice the pair's unless given",
    methods=("specexec", "suffix"),  # the methods that expand nodes by falling probability
    needs="cost",
)
class Cost:
    """Grows the tree with the most expected tokens per second.

    The probabilities of a tree's nodes are scaled so that their recent sums are right on average. A
    tree has at most _STRETCH times the rows of the largest pass so far, since the cost of more rows
    is unknown. The first tree is as large as a measured prior says.
    """

    _DECAY = 0.97  # decay of the sums per tree: about the last thirty count
    _PRIOR = 10.0  # tokens that are taken to have come as expected, at the start
    _STRETCH = 1.5
    _PROBE = 16  # every so many trees, one of another size is tried, for the fit
    _PROBED = (1.5, 0.5, 1.2)  # how many times as large as the best size those are, in turn

    def __init__(self, tree: TreeConfig, cost: IterationCost, pauses: Pauses | None = None) -> None:
        self._tree = tree
        self._cost = cost
        self._accepted = self._expected = self._PRIOR  # running sums of tokens
        self._caught = 0.7  # share of an expanded node's probability that its best child has
        self._iteration = self._steps = 0
        self._texts = self._pending = 1  # of the pass, see NextTree
        self._prompt_s = 0.0  # seconds that the rows of prompts take in this pass
        self._probing = False  # whether this tree tries one more step and another size
        self._probed = False  # whether it has taken that step
        self._drawn: Floats | None = None  # probabilities of the nodes that were expanded last
        self._known = 0  # number of nodes found before their children
        self._tree_expects = 0.0  # sum of the last tree's probabilities
        self._doubted = False  # whether even the best size is expected to be slower than no tree
        self._pauses = Pauses() if pauses is None else pauses
        self._compilations = 0  # kernels compiled before this iteration

    @property
    def trust(self) -> float:
        return self._accepted / self._expected

    def grow(self, next_tree: NextTree) -> SearchResult:
        """See BudgetPolicy; the method's search must be the best-first one."""
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
        # as if each node had only its best child
        children = log_probs[chosen] + np.log(self._caught)
        _, then = self._best(np.concatenate([log_probs, children]), self._steps + 1)
        if then <= now:
            if self._probed or not self._probing:
                return False
            self._probed = True
        self._steps += 1
        return True

    def size(self, log_probs: Floats) -> int:
        """How many of these nodes to verify, the most probable ones."""
        size, _ = self._best(log_probs, self._steps)
        if self._probing:
            by = self._PROBED[self._iteration // self._PROBE % len(self._PROBED)]
            size = math.ceil(by * size)  # the search keeps to the budget
        return size

    def _room(self) -> int:
        """The most nodes that a tree may have now."""
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
        expected = self.trust * np.cumsum(np.exp(falling))
        rows = self._pending + np.arange(1.0, most + 1.0)
        # beside a prompt, a tree must be worth its own time, but not the prompt's
        rates = (self._texts + expected) / (self._cost.seconds(rows, steps) - self._prompt_s)
        best = int(np.argmax(rates))
        return best + 1, float(rates[best])

    def observe(self, step: StepResult) -> None:
        """See BudgetPolicy. Passes with a prompt are not learned from, since later ones have none.

        In a pass of several texts a short prompt is allowed, since few such passes have none. An
        iteration in which kernels were compiled is not learned from either.
        """
        from specexec_kernels import cpu_jit

        if cpu_jit.compilations() > self._compilations:
            return
        if step.pending_rows > self._texts + (_PROMPT_ROWS if self._texts > 1 else 0):
            return
        tokens = 1.0 + self.trust * self._tree_expects / self._texts
        self._pauses.observe(step, tokens, self._doubted)
        if step.tree_nodes == 0:
            return
        self._accepted = self._DECAY * self._accepted + sum(step.drafted)
        self._expected = self._DECAY * self._expected + self._tree_expects
        rows = step.tree_nodes + step.pending_rows
        self._cost.observe(
            rows, self._steps, step.draft_s, step.draft_s + step.verify_s, step.read_s
        )
