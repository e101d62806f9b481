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
import torch
from torch import Tensor

from specexec_cli.config import MOST_NODES, TreeConfig
from specexec_cli.core import DraftTree, StepResult, common_prefix
from specexec_cli.drafting.calibration import Calibration, Reliability
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.policies import NextTree
from specexec_cli.drafting.protocols import Committed
from specexec_cli.drafting.scoring import DraftScorer, signals
from specexec_cli.drafting.search import (
    ROOT,
    Bools,
    Floats,
    Frontier,
    Ints,
    Search,
    SearchResult,
    grow_in_steps,
    grow_tree,
)
from specexec_cli.drafting.suffix import Repetitions, merged
from specexec_cli.drafting.tree_rows import TreeRows
from specexec_cli.models.graphs import StepRunner
from specexec_cli.models.kv_cache import SlotCache
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.pass_rows import PassRows, embeddable
from specexec_cli.models.shared_cache import SharedCache
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.planning.memory import OWN_PROMPT_ROWS
from specexec_cli.sampling import Sampler

# The search goes on for so many times the budget, in rows of the draft model's cache as well.
AHEAD = 2
_ENDED = object()


class ModelDrafter:
    """Grows trees with a draft model.

    Between trees the cache holds the committed tokens `tokens`, and behind them the rows of nodes
    that were found ahead. While a tree grows, the row of each expanded node joins them, in order of
    expansion.

    Args:
        shared: the target that the draft model is a copy of, whose cache rows it is to read; its
            `commit` is called before this one's.
        slots: cache rows that memory is planned for; unless told, the cache grows as it likes.
    """

    # of the present tree, see _reset_tree
    ahead_s: float
    _rows: TreeRows
    _slots: dict[int, int]
    _ahead: Iterator[bool] | None
    _kept: TreeRows | None

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
    ) -> None:
        self.model = model
        self._search = search
        # ids beyond the target's could never be accepted
        self._vocab_size = min(target_vocab_size, model.vocab_size)
        self.tokens: list[int] = []
        self._shared = shared
        captured = model.device.type == "cuda" and model.capturable
        if shared is None:
            self._state = model.new_state()
        else:
            assert isinstance(shared.state, SlotCache), "plans share a state only where all attend"
            self._state = SharedCache(shared.state)
            if captured:
                shared.state.let_steps_read()
        self._state.planned_slots = slots + 1  # captured steps have one for padding
        self._steps = None
        if captured:
            assert isinstance(self._state, SlotCache), "a model that can be captured attends"
            self._steps = StepRunner(model, self._state, capture=True)
        self._context: Sequence[int] = ()
        self._longest, self._seen_before = 0, False  # of the present tree
        self._reset_tree()
        self._learned = learned or Learned()
        self._repetitions = Repetitions()
        self.configure(sampler, tree)

    def configure(
        self,
        sampler: Sampler,
        tree: TreeConfig,
        learned: Learned | None = None,
        continuation: Sequence[int] = (),
    ) -> None:
        """See SessionDrafter."""
        self._tree = tree
        self._kept = None  # the noise may be another
        self._learned = learned = learned or self._learned
        self._policy = learned.policy(tree, continuation)
        kind = DraftScorer.kind(sampler, tree.scoring)
        self._scorer = DraftScorer(sampler, tree.scoring, tree.calibrated, learned.trust(kind))
        self._scorer.trust.calibration.reliability = Reliability()
        learned.keep(kind, self._scorer.trust)

    @property
    def calibration(self) -> Calibration:
        """What corrects the scores that this generation's trees are searched by."""
        return self._scorer.trust.calibration

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
            search: Search = self._search
            if len(self._rows) or self._rows.utilities:
                search = partial(grow_tree, known=self._known)
            found = self._policy.grow(
                NextTree(
                    search=search, expand=self._expand, max_depth=max_depth, signals=self._signals,
                    pending=pending, root_steps=0 if ROOT in self._rows.utilities else 1,
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
        depth = min(self._longest, 2 * self._tree.max_depth)
        depth = min(depth, self.model.context_length - len(self._context))
        if ROOT not in self._rows.utilities or self.rested or depth < 1:
            return
        self._slots = {ROOT: ROOT}
        budget = min(AHEAD * self._tree.budget, MOST_NODES)
        tree = replace(self._tree, budget=budget, batch=min(self._tree.batch, self._tree.budget))
        steps = grow_in_steps(self._expand, tree, depth, known=self._known)
        while len(self._rows) + tree.batch <= tree.budget and next(steps, _ENDED) is not _ENDED:
            yield True

    def begin(self, context: Sequence[int], max_depth: int) -> int:
        """Makes ready for the tree behind `context`; see `grow` for both.

        Returns:
            the longest path that the draft model may find; none where it is below 1.
        """
        kept, goes_on = self._kept, self.tokens == list(context)
        self._reset_tree()
        self._context, self._longest = context, max_depth
        self._seen_before = self._tree.past and self._repetitions.follow(context)
        if kept is not None and goes_on:
            self._rows = kept
        else:
            self._crop_to_common_prefix(context)
        if self._shared is not None and len(context) - len(self.tokens) > OWN_PROMPT_ROWS:
            return 0  # a prompt would take rows that the target is about to have
        return min(max_depth, self.model.context_length - len(context))

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
        rows, path = self._rows, self._rows.walk(tokens)
        for depth, (slot, token) in enumerate(zip([ROOT, *path], tokens, strict=False), 1):
            if slot in rows.utilities and token < self._vocab_size:
                self._scorer.observe(rows.utilities[slot], depth, token)
        went_on = self._ahead is not None and len(path) == len(tokens) and self._scorer.lasting
        self._rows = TreeRows()  # until all is done: whatever comes in between, nothing is kept
        if not went_on:
            path = path[: len(nodes)]
        kept, below = rows.below(path[-1], self._tree.budget) if went_on else ([], None)
        prefix_len = len(self.tokens)
        if self._shared is not None and not went_on:
            self._share(self._shared.tokens, whole=True)
        else:
            slots = [prefix_len + slot for slot in path], [prefix_len + slot for slot in kept]
            self._state.commit(prefix_len, *slots)
            self.tokens += tokens[: len(path)]
            if self._shared is not None:
                self._share(self._shared.tokens, whole=False)
        self._kept = below

    def copy_rows(self, other: ModelDrafter, length: int) -> None:
        """Takes the cache rows of the first `length` committed tokens of another text.

        Args:
            length: at most what the other has in its cache; this one is emptied first.
        """
        self._reset_tree()
        self.tokens.clear()
        self._state.crop(0)
        self.tokens = other.tokens[: self._state.copy(other._state, length)]

    def forget(self) -> None:
        """Empties its cache; what was learned stays, and so do captured steps."""
        self.tokens.clear()
        self._state.crop(0)
        self._repetitions.forget()
        self._reset_tree()

    def observe(self, step: StepResult) -> None:
        """Lets the policy learn from what the iteration brought and cost."""
        self._policy.observe(step)

    def _reset_tree(self) -> None:
        self.rested = False  # whether the policy wanted no tree where there was room for one
        self._result = SearchResult(DraftTree.empty(), np.zeros(0, dtype=np.int64))
        self._rows = TreeRows()  # of expanded nodes, behind the committed ones
        self._slots = {ROOT: ROOT}  # node id of the present search -> slot
        self._ahead = None  # under way since this tree was grown
        self._kept = None  # found ahead, below the last committed token
        self.ahead_s = 0.0

    def _crop_to_common_prefix(self, context: Sequence[int]) -> None:
        """Forgets what the context does not begin with; its last token must be run again."""
        if self._shared is not None:
            self._share(self._shared.tokens, whole=True)
            return
        del self.tokens[self._state.length :]  # growth that ran out of memory has emptied it
        common = common_prefix(self.tokens, context[:-1])
        del self.tokens[self._state.crop(common) :]

    def _share(self, tokens: Sequence[int], whole: bool) -> None:
        """Reads the rows of these committed tokens from the target's cache.

        Args:
            whole: own rows are dropped, not only those of these tokens.
        """
        assert isinstance(self._state, SharedCache)
        if whole:
            self._state.crop(0)
            self.tokens = list(tokens)
        self._state.share(len(tokens))

    def _expand(self, frontier: Frontier, width: int) -> tuple[Floats, Ints]:
        """Runs a frontier through the draft model, unless it has been; see search.Expand."""
        if self._known(frontier).all():
            slots = [self._slots[node] for node in frontier.ids.tolist()]
            utilities = torch.stack([self._rows.utilities[slot] for slot in slots])
            return self._scorer.best(utilities, width, frontier.depths + 1)
        rows, cache, logit_rows = self.rows_of(frontier)
        if self._steps is not None:
            logits = self._steps.forward(rows, logit_rows)
        else:
            logits = self.model.forward(rows, cache, logit_rows)
        return self.children(frontier, logits, width)

    def _known(self, frontier: Frontier) -> Bools:
        """See search.Known."""
        return np.array([self._found(*node) for node in _nodes(frontier)], dtype=np.bool_)

    def _found(self, node: int, parent: int, token: int) -> bool:
        """Whether there is a row of a node with its utilities; it then has a slot."""
        if node != ROOT and parent in self._slots:
            slot = self._rows.find(self._slots[parent], token)
            if slot is not None:
                self._slots[node] = slot
        return self._slots.get(node) in self._rows.utilities

    def rows_of(self, frontier: Frontier) -> tuple[PassRows, ModelState, Sequence[int]]:
        """What the draft model is to be given: rows, their cache, and the rows of the frontier."""
        if frontier.ids[0] != ROOT:
            rows = self._tree_rows(frontier)
            return rows, self._state, range(len(rows.tokens))
        pending = list(self._context[len(self.tokens) :])
        rows = PassRows.chain(embeddable(pending, self.model.vocab_size), len(self.tokens))
        return rows, self._state, range(len(pending) - 1, len(pending))

    def fed(self) -> None:
        """The rows of the whole context have been through the draft model."""
        self.tokens = list(self._context)

    def children(self, frontier: Frontier, logits: Tensor, width: int) -> tuple[Floats, Ints]:
        """The children of nodes whose rows have been through the draft model; see search.Expand.

        Args:
            logits: (nodes, vocab) the draft model's.
        """
        if frontier.ids[0] == ROOT:
            self.fed()
        return self._children(frontier, logits[:, : self._vocab_size], width)

    def _children(self, frontier: Frontier, logits: Tensor, width: int) -> tuple[Floats, Ints]:
        """Each node's children, best first, from its (vocab,) row of logits."""
        positions = (len(self._context) + frontier.depths).tolist()
        slots = [self._slots[node] for node in frontier.ids.tolist()]
        paths = [self._rows.path(slot) for slot in slots] if self._scorer.constrained else None
        utilities = self._scorer.utilities(logits, positions, self._context, paths)
        self._rows.utilities.update(zip(slots, utilities, strict=True))
        return self._scorer.best(utilities, width, frontier.depths + 1)

    def _signals(self, ids: Ints) -> Floats:
        """What policies read of expanded nodes; see policies.Signals."""
        slots = [self._slots[node] for node in ids.tolist()]
        return signals(torch.stack([self._rows.utilities[slot] for slot in slots]))

    def _tree_rows(self, frontier: Frontier) -> PassRows:
        """The frontier as rows behind those already expanded; they join the slots."""
        old = len(self._rows)
        positions = len(self._context) - 1 + frontier.depths
        parents = [self._slots[parent] for parent in frontier.parents.tolist()]
        mask = self._rows.add(parents, frontier.tokens.tolist(), positions)
        self._slots.update({node: old + row for row, node in enumerate(frontier.ids.tolist())})
        return PassRows(
            tokens=frontier.tokens.tolist(),
            positions=positions.tolist(),
            prefix_len=len(self.tokens),
            pending=0,
            tree_mask=mask,
            tree_positions=self._rows.positions,
            parents=len(self.tokens) + np.array(parents),  # ROOT is -1: the last committed row
        )


def _nodes(frontier: Frontier) -> list[tuple[int, int, int]]:
    """(id, parent, token) of each."""
    columns = frontier.ids.tolist(), frontier.parents.tolist(), frontier.tokens.tolist()
    return list(zip(*columns, strict=True))
