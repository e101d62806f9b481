"""The drafter: a resident draft model that grows trees by batched best-first search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree, StepResult, common_prefix
from specexec_cli.drafting.calibration import Calibration, Reliability
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.scoring import DraftScorer, signals
from specexec_cli.drafting.search import (
    ROOT,
    Floats,
    Frontier,
    Ints,
    Search,
    SearchResult,
    grow_tree,
)
from specexec_cli.drafting.suffix import Repetitions, merged
from specexec_cli.models.graphs import StepRunner
from specexec_cli.models.kv_cache import SlotCache
from specexec_cli.models.pass_rows import PassRows, embeddable
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.sampling import Sampler


class Drafter(Protocol):
    """What decoding needs of a drafter."""

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        """A tree of likely continuations of `context`, paths of at most `max_depth` tokens.

        Args:
            pending: committed rows that the target's pass will carry besides the tree.
        """

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Tells which nodes of the last tree were accepted, and every token committed."""

    def observe(self, step: StepResult) -> None:
        """Tells what the iteration brought and cost."""


class SessionDrafter(Drafter, Protocol):
    """What a session needs of a drafter, which it keeps from one generation to the next."""

    rested: bool  # whether the policy wanted no tree where there was room for one

    def configure(
        self,
        sampler: Sampler,
        tree: TreeConfig,
        learned: Learned | None = None,
        continuation: Sequence[int] = (),
    ) -> None:
        """Settings of the next generation; caches and what was learned stay.

        Args:
            learned: about the pair, by all generations so far; what it had unless told.
            continuation: the text to come, where a policy must be told.
        Raises:
            CheckpointError: the policy is disco, and its classifier cannot be used.
        """

    def forget(self) -> None:
        """Empties its caches; what was learned stays."""


class ModelDrafter:
    """Grows trees with a draft model.

    Between trees the cache holds the committed tokens `tokens`. While a tree grows, the row of
    each expanded node joins behind them, in order of expansion.
    """

    def __init__(
        self,
        model: StreamedModel,
        sampler: Sampler,
        tree: TreeConfig,
        target_vocab_size: int,
        search: Search = grow_tree,
        learned: Learned | None = None,
    ) -> None:
        self.model = model
        self._search = search
        # ids beyond the target's could never be accepted
        self._vocab_size = min(target_vocab_size, model.vocab_size)
        self.tokens: list[int] = []
        self._cache = model.new_cache()
        captured = model.device.type == "cuda" and model.capturable
        self._steps = StepRunner(model, self._cache, capture=True) if captured else None
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
            found = self._policy.grow(self._search, self._expand, max_depth, self._signals, pending)
            rested = not len(found.tree)
        return self.take(found, self._tree.budget, rested)

    def begin(self, context: Sequence[int], max_depth: int) -> int:
        """Makes ready for the tree behind `context`; see `grow` for both.

        Returns:
            the longest path that the draft model may find; none where it is below 1.
        """
        self._context, self._longest = context, max_depth
        self._seen_before = self._tree.past and self._repetitions.follow(context)
        self._reset_tree()
        self._crop_to_common_prefix(context)
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
        """Keeps the rows of accepted nodes; the last of them may never have been expanded."""
        self._repetitions.learn(tokens)
        ids = [int(self._result.ids[node]) for node in nodes]
        for depth, (node_id, token) in enumerate(zip([ROOT, *ids], tokens, strict=False), 1):
            if node_id in self._utilities and token < self._vocab_size:
                self._scorer.observe(self._utilities[node_id], depth, token)
        slots = [self._slots[node_id] for node_id in ids if node_id in self._slots]
        prefix_len = len(self.tokens)
        self._cache.compact(prefix_len, [prefix_len + slot for slot in slots])
        self.tokens += [int(self._result.tree.tokens[node]) for node in nodes[: len(slots)]]

    def copy_rows(self, other: ModelDrafter, length: int) -> None:
        """Takes the cache rows of the first `length` committed tokens of another text.

        Args:
            length: at most what the other has in its cache; this one is emptied first.
        """
        self._reset_tree()
        self.tokens.clear()
        self._cache.crop(0)
        self._cache.copy_rows(other._cache, length)
        self.tokens = other.tokens[:length]

    def forget(self) -> None:
        """Empties its cache; what was learned stays, and so do captured steps."""
        self.tokens.clear()
        self._cache.crop(0)
        self._repetitions.forget()
        self._reset_tree()

    def observe(self, step: StepResult) -> None:
        """Lets the policy learn from what the iteration brought and cost."""
        self._policy.observe(step)

    def _reset_tree(self) -> None:
        self.rested = False  # whether the policy wanted no tree where there was room for one
        self._result = SearchResult(DraftTree.empty(), np.zeros(0, dtype=np.int64))
        self._slots: dict[int, int] = {}  # node id -> slot behind the committed prefix
        self._utilities: dict[int, Tensor] = {}  # expanded node id -> (vocab,)
        self._paths: dict[int, tuple[int, ...]] = {}  # likewise, from the root; see _paths_to
        self._ancestors = np.zeros((0, 0), dtype=bool)  # among slots, self included
        self._positions = np.zeros(0, dtype=np.int64)

    def _crop_to_common_prefix(self, context: Sequence[int]) -> None:
        """Forgets what the context does not begin with; its last token must be run again."""
        del self.tokens[self._cache.length :]  # growth that ran out of memory has emptied it
        common = common_prefix(self.tokens, context[:-1])
        del self.tokens[common:]
        self._cache.crop(common)

    def _expand(self, frontier: Frontier, width: int) -> tuple[Floats, Ints]:
        """Runs a frontier through the draft model; see search.Expand."""
        rows, cache, logit_rows = self.rows_of(frontier)
        if self._steps is not None:
            logits = self._steps.forward(rows, logit_rows)
        else:
            logits = self.model.forward(rows, cache, logit_rows)
        return self.children(frontier, logits, width)

    def rows_of(self, frontier: Frontier) -> tuple[PassRows, SlotCache, Sequence[int]]:
        """What the draft model is to be given: rows, their cache, and the rows of the frontier."""
        if frontier.ids[0] != ROOT:
            rows = self._tree_rows(frontier)
            return rows, self._cache, range(len(rows.tokens))
        pending = list(self._context[len(self.tokens) :])
        rows = PassRows.chain(embeddable(pending, self.model.vocab_size), len(self.tokens))
        return rows, self._cache, range(len(pending) - 1, len(pending))

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
        paths = self._paths_to(frontier) if self._scorer.constrained else None
        utilities = self._scorer.utilities(logits, positions, self._context, paths)
        self._utilities.update(zip(frontier.ids.tolist(), utilities, strict=True))
        return self._scorer.best(utilities, width, frontier.depths + 1)

    def _paths_to(self, frontier: Frontier) -> list[tuple[int, ...]]:
        """The tokens from the root to each node, the node's own last; none to the root."""
        found = []
        for node, parent, token in zip(
            frontier.ids.tolist(), frontier.parents.tolist(), frontier.tokens.tolist(), strict=True
        ):
            self._paths[node] = (*self._paths[parent], token) if node != ROOT else ()
            found.append(self._paths[node])
        return found

    def _signals(self, ids: Ints) -> Floats:
        """What policies read of expanded nodes; see policies.Signals."""
        utilities = torch.stack([self._utilities[node] for node in ids.tolist()])
        return signals(utilities)

    def _tree_rows(self, frontier: Frontier) -> PassRows:
        """The frontier as rows behind those already expanded; they join the slots."""
        old, new = len(self._positions), len(frontier.ids)
        ancestors = np.zeros((old + new, old + new), dtype=bool)
        ancestors[:old, :old] = self._ancestors
        for row, parent in enumerate(frontier.parents.tolist()):
            if parent != ROOT:
                ancestors[old + row, :old] = self._ancestors[self._slots[parent]]
            ancestors[old + row, old + row] = True
        positions = len(self._context) - 1 + frontier.depths
        self._ancestors = ancestors
        self._positions = np.concatenate([self._positions, positions])
        self._slots.update({node: old + row for row, node in enumerate(frontier.ids.tolist())})
        return PassRows(
            tokens=frontier.tokens.tolist(),
            positions=positions.tolist(),
            prefix_len=len(self.tokens),
            pending=0,
            tree_mask=ancestors[old:],
            tree_positions=self._positions,
        )
