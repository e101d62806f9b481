"""The policy heuristic: transformers' schedule for assisted generation, carried over to trees.

The next draft is two tokens deeper after one that was accepted whole, and one token less deep
otherwise. Source: `num_assistant_tokens_schedule="heuristic"` in transformers' GenerationConfig.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specexec_cli.config import TreeConfig
from specexec_cli.drafting.policies.registry import NextTree, policy

if TYPE_CHECKING:
    from specexec_cli.core import StepResult
    from specexec_cli.drafting.search import SearchResult


@policy("heuristic", help="deeper after a tree accepted whole")
class Heuristic:
    """Sets the depth by transformers' schedule, and the budget in proportion to it."""

    _START = 5  # depth of the first tree, tokens

    def __init__(self, tree: TreeConfig) -> None:
        self._tree = tree
        self._depth = min(self._START, tree.max_depth)

    def grow(self, next_tree: NextTree) -> SearchResult:
        """See BudgetPolicy."""
        full = self._tree
        budget = full.budget * self._depth // full.max_depth  # room for one path at least
        return next_tree.found(replace(full, budget=budget, max_depth=self._depth))

    def observe(self, step: StepResult) -> None:
        """See BudgetPolicy. A tree counts as accepted whole if its deepest level was reached."""
        if step.tree_depth:
            reached = sum(step.drafted) == step.tree_depth
            self._depth = self._depth + 2 if reached else self._depth - 1
            self._depth = min(max(self._depth, 1), self._tree.max_depth)
