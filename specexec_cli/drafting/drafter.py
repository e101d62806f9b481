"""The drafter: a resident draft model that grows trees by batched best-first search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.drafting.calibration import Calibration
from specexec_cli.drafting.draft_rows import DraftRows
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.mtp_rows import head_rows
from specexec_cli.drafting.policies import NextTree
from specexec_cli.drafting.protocols import Committed
from specexec_cli.drafting.search import Floats, Frontier, Ints, Search, SearchResult, grow_tree
from specexec_cli.drafting.suffix import Repetitions, merged
from specexec_cli.drafting.tree_scores import MakeScores, TreeScores
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.sampling import Sampler


class ModelDrafter:
    """Grows trees with a draft model; a SessionDrafter.

    Args:
        model: the draft model.
        sampler: the target's sampler, for the first generation.
        tree: the tree's settings, for the first generation.
        target_vocab_size: token ids from there on are never drafted.
        search: finds the tree.
        learned: what earlier generations taught about the pair.
        shared, slots, window: see DraftRows; of a trained head, `shared` is its target.
        scores: makes the object that scores the children of nodes, and learns.
    Attributes:
        paused: whether the policy wanted no tree where there was room for one.
    """

    def __init__(
        self,
        model: StreamedModel,
        sampler: Sampler,
        tree: TreeConfig,
        target_vocab_size: int,
        search: Search = grow_tree,
        learned: Learned | None = None,
        shared: Committed | None = None,
        slots: int = 0,
        scores: MakeScores = TreeScores,
        window: int | None = None,
    ) -> None:
        if model.reads_hidden_rows:
            assert shared is not None, "a trained head reads its target's rows"
            self.rows: DraftRows = head_rows(model, shared, slots)
        else:
            self.rows = DraftRows(model, shared, slots, window)
        self._search = search
        self._vocab_size = min(target_vocab_size, model.vocab_size)
        # of the present tree: its longest path, and whether the context's end occurred before
        self._longest, self._seen_before = 0, False
        self._learned = learned or Learned()
        self._repetitions = Repetitions()
        self._make_scores = scores
        self.configure(sampler, tree)
        self._reset_tree()

    def configure(self, sampler: Sampler, tree: TreeConfig, learned: Learned | None = None) -> None:
        """See SessionDrafter."""
        self._tree = tree
        self._learned = learned or self._learned
        self._policy = self._learned.policy(tree)
        self.scores = self._make_scores(self.rows, sampler, tree, self._learned)

    @property
    def calibration(self) -> Calibration:
        """The calibration that corrects the scores of this generation's trees."""
        return self.scores.calibration

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        """The most probable continuations of `context` under the draft model.

        With `past` in the tree's settings, repetitions of the text's own past are added. The tree
        may be empty, for example before a trained head's target has read the prompt.

        Args:
            context: every committed token, at least one; the last is the root.
            max_depth: longest path, tokens; 0 gives an empty tree.
            pending: committed rows that the target's pass will carry besides the tree.
        """
        max_depth = self.begin(context, max_depth)
        found, paused = None, False
        if max_depth >= 1:
            found = self._policy.grow(
                NextTree(
                    search=self._search, expand=self._expand, max_depth=max_depth,
                    signals=self.scores.signals, pending=pending,
                )
            )  # fmt: skip
            paused = not len(found.tree)
        return self.take(found, self._tree.budget, paused)

    def begin(self, context: Sequence[int], max_depth: int) -> int:
        """Prepares the tree after `context`; see `grow` for the arguments.

        Returns:
            the longest path that the draft model can find; below 1 it cannot draft.
        """
        self._reset_tree()
        self._longest = max_depth
        self._seen_before = self._tree.past and self._repetitions.follow(context)
        return min(max_depth, self.rows.begin(context, min(max_depth, self._tree.max_depth)))

    def take(self, found: SearchResult | None, budget: int, paused: bool) -> DraftTree:
        """The tree that a search found, with repetitions of the text's past added.

        Args:
            found: the search's result; None if the draft model was not asked.
            budget: most nodes of both together.
            paused: whether the policy wanted no tree.
        """
        self.paused = paused
        if found is not None:
            self._result = found
        if self._seen_before and self._longest >= 1 and not self.paused and budget >= 1:
            longest = min(self._longest, self._tree.budget)
            self._result = self._with_repetitions(self._result, longest, budget)
        return self._result.tree

    def _with_repetitions(self, found: SearchResult, max_depth: int, budget: int) -> SearchResult:
        """Adds repetitions that are at least as probable as the tree's least probable node.

        They cost no draft step, and their paths may be longer than those of the draft model.
        """
        least = float(found.tree.log_probs.min(initial=0.0)) if len(found.tree) else -np.inf
        other = grow_tree(self._repetitions.expand, self._tree, max_depth).tree
        return merged(found, other, least, budget)

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Keeps the rows of accepted nodes, and learns from the committed tokens.

        The last accepted node may have no row, if it was never expanded.
        """
        self._repetitions.learn(tokens)
        path = self.rows.tree.walk(tokens)
        self.scores.learn(path, tokens)
        self.rows.commit(path[: len(nodes)], tokens)

    def copy_rows(self, other: ModelDrafter, length: int) -> None:
        """Replaces the cache by a copy of another text's first rows; see DraftRows.copy."""
        self._reset_tree()
        self.rows.copy(other.rows, length)

    def forget(self) -> None:
        """Empties the caches; what was learned stays, and so do captured steps."""
        self._reset_tree()
        self.rows.forget()
        self._repetitions.forget()

    def observe(self, step: StepResult) -> None:
        """Lets the policy learn from what the iteration brought and cost."""
        self._policy.observe(step)

    def _reset_tree(self) -> None:
        self.paused = False
        self._result = SearchResult(DraftTree.empty(), np.zeros(0, dtype=np.int64))

    def _expand(self, frontier: Frontier, width: int) -> tuple[Floats, Ints]:
        """Runs a frontier through the draft model; its children, as search.Expand says."""
        return self.children(frontier, self.rows.run(frontier), width)

    def children(self, frontier: Frontier, logits: Tensor, width: int) -> tuple[Floats, Ints]:
        """The children of nodes that have been run, as search.Expand says.

        Args:
            frontier: the nodes.
            logits: (nodes, vocab) the draft model's, after each node.
            width: most children of a node.
        """
        self.rows.ran(frontier)
        return self.scores.children(frontier, logits[:, : self._vocab_size], width)
