"""The policy fixed: every tree has the budget, depth and batch that were given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specexec_cli.config import TreeConfig
from specexec_cli.drafting.policies.registry import NextTree, policy

if TYPE_CHECKING:
    from specexec_cli.core import StepResult
    from specexec_cli.drafting.search import SearchResult


@policy("fixed", help="all of it")
class Fixed:
    """Grows every tree as large as it may be."""

    def __init__(self, tree: TreeConfig) -> None:
        self._tree = tree

    def grow(self, next_tree: NextTree) -> SearchResult:
        """See BudgetPolicy."""
        return next_tree.found(self._tree)

    def observe(self, step: StepResult) -> None:
        """See BudgetPolicy. Learns nothing."""
