"""The policy disco: trees as deep as a classifier that was trained for the pair finds promising.

The paper decides after each token of a chain whether to draft another. For a tree this is decided
after each level, by the mean over the nodes about to be expanded, weighted by how probable each is;
for a chain, with one node in each level, it is the same. Where a chain's tokens are drawn and
verified by rejection sampling, the decision never drops a token that was drawn, so the text keeps
the target's distribution. drafting/classifier.py is the classifier, and lab/training.py trains it.

Source: Mamou et al., arXiv:2405.04304, section 3.
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
    # the paper's chains, and the methods that rank by the target's own noise
    methods=("specexec", "chain", "chain-coupled", "beam", "beam-pruned"),
    needs="classifier",
)
class Disco:
    """Grows each tree while the classifier finds its last level promising."""

    def __init__(self, tree: TreeConfig, classifier: Classifier) -> None:
        self._tree = tree
        self._classifier = classifier
        self._generated = 0  # tokens of this generation; each generation has its own object

    def grow(self, next_tree: NextTree) -> SearchResult:
        """See BudgetPolicy."""
        assert next_tree.signals is not None, "several texts never share a pass under this policy"
        self._signals = next_tree.signals
        depth = min(next_tree.max_depth, self._classifier.max_length)
        return replace(next_tree, max_depth=depth).found(self._tree, self)

    def goes_on(self, log_probs: Floats, frontier: Frontier) -> bool:
        """Whether the nodes about to be expanded are likely enough to be accepted."""
        # a token's chance is read from the distribution that it was drafted from, its parent's
        signals = self._signals(frontier.parents)
        positions = self._generated + frontier.depths
        chance = self._classifier.chance(signals, positions, log_probs[frontier.ids])
        return chance >= self._classifier.threshold

    def size(self, log_probs: Floats) -> int:
        """How many nodes to verify: all of them; the search keeps to the budget."""
        return len(log_probs)

    def observe(self, step: StepResult) -> None:
        """See BudgetPolicy. Counts positions; the classifier itself learns nothing more."""
        self._generated += len(step.tokens)
