"""The drafter: a resident draft model that grows trees by batched best-first search.

While the target's pass waits for weights, it may go on (`ahead`): the search for the last tree goes
on with twice the budget, so to the continuations that are next in probability. Of the nodes that it
finds there, those behind the committed tokens are kept, and the next search has their children
without a draft step. A search's result does not depend on the order in which nodes are expanded, so
under fixed budgets and the same calibration the next tree is the one that it would be anyway.
Policies that weigh steps, such as cost, are not asked about nodes that are known, and calibration
learns from more of them, so theirs may differ; the text does not.
Source: growing while weights stream, as ShadowSpec does for SubSpec's drafts (arXiv:2509.18344).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from specexec_cli.config import MOST_NODES, TreeConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.drafting.calibration import Calibration
from specexec_cli.drafting.draft_rows import DraftRows
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.policies import NextTree
from specexec_cli.drafting.protocols import Committed
from specexec_cli.drafting.search import (
    ROOT,
    Floats,
    Frontier,
    Ints,
    Search,
    SearchResult,
    grow_in_steps,
    grow_tree,
)
from specexec_cli.drafting.suffix import Repetitions, merged
from specexec_cli.drafting.tree_scores import MakeScores, TreeScores
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.sampling import Sampler

# The search goes on for so many times the budget, in rows of the draft model's cache as well.
AHEAD = 2
_ENDED = object()


class ModelDrafter:
    """Grows trees with a draft model.

    Args:
        scores: what scores the children of nodes, and learns.
        shared, slots: see DraftRows.
    """

    # of the present tree, see _reset_tree
    ahead_s: float
    _ahead: Iterator[bool] | None

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
    ) -> None:
        self.rows = DraftRows(model, shared, slots)
        self._search = search
        # ids beyond the target's could never be accepted
        self._vocab_size = min(target_vocab_size, model.vocab_size)
        self._longest, self._seen_before = 0, False  # of the present tree
        self._learned = learned or Learned()
        self._repetitions = Repetitions()
        self._make_scores = scores
        self.configure(sampler, tree)
        self._reset_tree()

    def configure(
        self,
        sampler: Sampler,
        tree: TreeConfig,
        learned: Learned | None = None,
        continuation: Sequence[int] = (),
    ) -> None:
        """See SessionDrafter."""
        self._tree = tree
        self.rows.kept = None  # the noise may be another
        self._learned = learned or self._learned
        self._policy = self._learned.policy(tree, continuation)
        self.scores = self._make_scores(self.rows, sampler, tree, self._learned)

    @property
    def calibration(self) -> Calibration:
        """What corrects the scores that this generation's trees are searched by."""
        return self.scores.calibration

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        """The most probable continuations of `context` under the draft model.

        With `past` in the tree's settings, what the text went on with before joins them.

        Args:
            context: every committed token, at least one; the last is the root.
            max_depth: longest path; 0 gives an empty tree. So does a context that has outgrown
                the draft model's window, while the target's may be longer.
            pending: committed rows that the target's pass will carry besides the tree.
        """
        max_depth = self.begin(context, max_depth)
        found, rested = None, False
        if max_depth >= 1:
            search, utilities = self._search, self.rows.tree.utilities
            if len(self.rows.tree) or utilities:
                search = partial(grow_tree, known=self.rows.known)
            found = self._policy.grow(
                NextTree(
                    search=search, expand=self._expand, max_depth=max_depth,
                    signals=self.scores.signals, pending=pending,
                    root_steps=0 if ROOT in utilities else 1,
                )
            )  # fmt: skip
            rested = not len(found.tree)
        return self.take(found, self._tree.budget, rested)

    def ahead(self) -> bool:
        """See AheadDrafter; False where enough is known, or there is nothing to go on from."""
        began_s = time.perf_counter()
        if self._ahead is None:
            self._ahead = self._going_on()
        stepped = next(self._ahead, False)
        if stepped:
            self.ahead_s += time.perf_counter() - began_s
        return stepped

    def _going_on(self) -> Iterator[bool]:
        """The search for the last tree with `AHEAD` times its budget, True behind each step."""
        depth = min(self._longest, 2 * self._tree.max_depth, self.rows.room)
        if ROOT not in self.rows.tree.utilities or self.rested or depth < 1:
            return
        self.rows.number_anew()
        budget = min(AHEAD * self._tree.budget, MOST_NODES)
        tree = replace(self._tree, budget=budget, batch=min(self._tree.batch, self._tree.budget))
        steps = grow_in_steps(self._expand, tree, depth, known=self.rows.known)
        while len(self.rows.tree) + tree.batch <= tree.budget and next(steps, _ENDED) is not _ENDED:
            yield True

    def begin(self, context: Sequence[int], max_depth: int) -> int:
        """Makes ready for the tree behind `context`; see `grow` for both.

        Returns:
            the longest path that the draft model may find; none where it is below 1.
        """
        self._reset_tree()
        self._longest = max_depth
        self._seen_before = self._tree.past and self._repetitions.follow(context)
        return min(max_depth, self.rows.begin(context))

    def take(self, found: SearchResult | None, budget: int, rested: bool) -> DraftTree:
        """The tree that a search came to, and what the text's past adds to it.

        Args:
            found: None where the draft model was not asked.
            budget: most nodes of both together.
            rested: whether the policy wanted no tree.
        """
        self.rested = rested
        if found is not None:
            self._result = found
        if self._seen_before and self._longest >= 1 and not self.rested and budget >= 1:
            longest = min(self._longest, self._tree.budget)
            self._result = self._with_repetitions(self._result, longest, budget)
        return self._result.tree

    def _with_repetitions(self, found: SearchResult, max_depth: int, budget: int) -> SearchResult:
        """The tree with such repetitions as are no less probable than its own nodes.

        They cost no draft step, and may be longer than the paths that a draft model finds.
        """
        least = float(found.tree.log_probs.min(initial=0.0)) if len(found.tree) else -np.inf
        other = grow_tree(self._repetitions.expand, self._tree, max_depth).tree
        return merged(found, other, least, budget)

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Keeps the rows of accepted nodes; the last of them may never have been expanded.

        Where the search went on to the bonus token, what it found behind that is kept as well.
        """
        self._repetitions.learn(tokens)
        path = self.rows.tree.walk(tokens)
        self.scores.learn(path, tokens)
        if self._ahead is not None and len(path) == len(tokens) and self.scores.lasting:
            self.rows.commit(path, tokens, keep=self._tree.budget)
        else:
            self.rows.commit(path[: len(nodes)], tokens)

    def copy_rows(self, other: ModelDrafter, length: int) -> None:
        """Takes the rows of the first `length` committed tokens of another text, see DraftRows."""
        self._reset_tree()
        self.rows.copy(other.rows, length)

    def forget(self) -> None:
        """Empties its cache; what was learned stays, and so do captured steps."""
        self._reset_tree()
        self.rows.forget()
        self._repetitions.forget()

    def observe(self, step: StepResult) -> None:
        """Lets the policy learn from what the iteration brought and cost."""
        self._policy.observe(step)

    def _reset_tree(self) -> None:
        self.rested = False  # whether the policy wanted no tree where there was room for one
        self._result = SearchResult(DraftTree.empty(), np.zeros(0, dtype=np.int64))
        self._ahead = None  # under way since this tree was grown
        self.ahead_s = 0.0

    def _expand(self, frontier: Frontier, width: int) -> tuple[Floats, Ints]:
        """Runs a frontier through the draft model, unless it has been; see search.Expand."""
        if self.rows.known(frontier).all():
            return self.scores.known_children(frontier, width)
        return self.children(frontier, self.rows.run(frontier), width)

    def children(self, frontier: Frontier, logits: Tensor, width: int) -> tuple[Floats, Ints]:
        """The children of nodes whose rows have been through the draft model; see search.Expand.

        Args:
            logits: (nodes, vocab) the draft model's.
        """
        self.rows.ran(frontier)
        return self.scores.children(frontier, logits[:, : self._vocab_size], width)
