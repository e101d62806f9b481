"""The policy disco: as deep as a classifier that was trained for the pair finds promising.

Mamou et al., arXiv:2405.04304, section 3, decide per token of a chain. For a tree it is decided per
level, by the mean over the nodes about to be expanded, weighted by how probable each is: a chain is
a level of one node. Where a chain's tokens are drawn and verified by rejection sampling, a draft
ends behind a token that was drawn already: the text keeps the target's distribution.
drafting/classifier.py is the classifier, lab/training.py makes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specexec_cli.config import TreeConfig
from specexec_cli.drafting.policies.registry import NextTree, policy

if TYPE_CHECKING:
    from specexec_cli.core import StepResult
    from specexec_cli.drafting.classifier import Classifier
    from specexec_cli.drafting.search import Floats, Frontier, SearchResult


@policy(
    "disco",
    help="as deep as the pair's trained classifier says, see train-policy",
    # chains as the paper has them, and those whose drafts are the target's own choices if any are
    methods=("specexec", "chain", "chain-coupled", "beam", "beam-pruned"),
    needs="classifier",
)
class Disco:
    """Grows trees while the classifier finds the last level promising."""

    def __init__(self, tree: TreeConfig, classifier: Classifier) -> None:
        self._tree = tree
        self._classifier = classifier
        self._generated = 0  # tokens: a new generation has a new object

    def grow(self, next_tree: NextTree) -> SearchResult:
        """See BudgetPolicy."""
        assert next_tree.signals is not None, "several texts never share a pass under this policy"
        self._signals = next_tree.signals
        depth = min(next_tree.max_depth, self._classifier.max_length)
        return replace(next_tree, max_depth=depth).found(self._tree, self)

    def goes_on(self, log_probs: Floats, frontier: Frontier) -> bool:
        """Whether the nodes about to be expanded are likely enough to be accepted."""
        # a token's chance is read from the distribution it was drafted from: its parent's
        signals = self._signals(frontier.parents)
        positions = self._generated + frontier.depths
        chance = self._classifier.chance(signals, positions, log_probs[frontier.ids])
        return chance >= self._classifier.threshold

    def size(self, log_probs: Floats) -> int:
        """How many nodes to verify: all of them, within the budget."""
        return len(log_probs)

    def observe(self, step: StepResult) -> None:
        """See BudgetPolicy; a trained classifier learns no more, but it reads positions."""
        self._generated += len(step.tokens)
