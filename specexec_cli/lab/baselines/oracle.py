"""The policy oracle: a chain that ends exactly where the target's own text departs from it.

The text must be known beforehand, so only `bench` can use it. It is the bound for every policy of
chains. Source: Mamou et al., arXiv:2405.04304, section 3, "oracle SL".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specexec_cli.config import TreeConfig
from specexec_cli.drafting.policies.registry import NextTree, policy

if TYPE_CHECKING:
    from specexec_cli.core import StepResult
    from specexec_cli.drafting.search import Floats, Frontier, SearchResult


@policy(
    "oracle",
    help="chain-coupled drafts exactly as long as will be accepted, the bound",
    methods=("chain-coupled",),  # one path, ranked by the target's own noise
    needs="continuation",
)
class Oracle:
    """Grows chains that end at the first token that is not the target's.

    Args:
        tree: bounds of a chain.
        continuation: the target's own tokens, from the next one on.
    """

    def __init__(self, tree: TreeConfig, continuation: Sequence[int]) -> None:
        self._tree = tree
        self._continuation = list(continuation)

    def grow(self, next_tree: NextTree) -> SearchResult:
        """See BudgetPolicy; the method's search must be one of single paths."""
        return next_tree.found(self._tree, self)

    def goes_on(self, log_probs: Floats, frontier: Frontier) -> bool:
        """Whether the path's last token is the target's; all before it were."""
        depth, token = int(frontier.depths[-1]), int(frontier.tokens[-1])
        return self._continuation[depth - 1 : depth] == [token]

    def size(self, log_probs: Floats) -> int:
        """How many nodes to verify: all of them."""
        return len(log_probs)

    def observe(self, step: StepResult) -> None:
        """See BudgetPolicy."""
        self._continuation = self._continuation[len(step.tokens) :]
