"""The draft trees of several texts, found by one best-first search over all of them.

To the search they are one tree: its root has the children of every text's root. A node's score is
its probability given its own text, so the nodes of a pass go where they are most likely to be
accepted, and a text that is easy to guess gets more of them. The policy sizes the one tree as it
sizes that of a single text, so the rows of all texts together stay within the knee.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.policies import POLICIES, NextTree
from specexec_cli.drafting.search import (
    ROOT,
    Floats,
    Frontier,
    Ints,
    SearchResult,
    grow_tree,
)
from specexec_cli.drafting.suffix import SuffixDrafter
from specexec_cli.errors import ConfigError, SpecexecError
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.planning.memory import nodes_of_a_text

# The drafters that can take part in a search over several texts
ForestDrafter = ModelDrafter | SuffixDrafter


@dataclass(slots=True)
class GrowingText:
    """One text of a pass while its tree grows."""

    drafter: ForestDrafter
    context: Sequence[int]  # every committed token, the root last
    max_depth: int  # longest path that could still be committed, tokens
    error: SpecexecError | None = None  # why this text cannot go on


class Forest:
    """Grows the trees of all texts of a pass together.

    Args:
        model: the draft model of all texts' drafters; None if they draft from their past.
        tree: budget and batch are those of all texts together.
        texts: most texts at once.
        learned: what was learned about the pair; its policy sizes the trees.
    Raises:
        ConfigError: the policy looks at one text's draft, or one text's continuation.
    """

    def __init__(
        self, model: StreamedModel | None, tree: TreeConfig, texts: int, learned: Learned
    ) -> None:
        needs = POLICIES[tree.policy].needs
        if needs not in (None, "cost"):
            able = [name for name, entry in POLICIES.items() if entry.needs in (None, "cost")]
            raise ConfigError(
                f"`policy='{tree.policy}'` cannot share a pass among several texts: use "
                f"{' or '.join(able)}"
            )
        self._model = model
        self._cost = learned.cost if needs == "cost" else None
        self._tree = tree
        self._most_nodes = nodes_of_a_text(tree.budget, texts)
        self._policy = learned.policy(tree)

    @property
    def most_pending(self) -> int | None:
        """The pending rows with which a pass takes about twice as long as without; None if that is
        not known."""
        model = self._cost.model if self._cost is not None else None
        return int(model.knee_rows + model.base_s / model.row_s) if model and model.row_s else None

    def feed(self, texts: Sequence[tuple[ForestDrafter, Sequence[int]]]) -> None:
        """Runs committed tokens through the draft model, for texts with a prompt under way.

        Args:
            texts: each text's drafter, and its tokens so far.
        """
        begun = [
            drafter
            for drafter, context in texts
            if isinstance(drafter, ModelDrafter)
            and (known := drafter.rows.readable(context))
            and drafter.begin(known, 1) >= 1
        ]
        if begun and self._model is not None:
            self._model.forward_together(
                [drafter.rows.rows_of(Frontier.root()) for drafter in begun]
            )
            for drafter in begun:
                drafter.rows.fed()

    def grow(self, texts: Sequence[GrowingText], pending: int) -> list[DraftTree]:
        """Grows a tree for each text. A text with a drafting error gets none, and has the error.

        Args:
            texts: the texts that get a token from the pass.
            pending: committed rows of all texts that the pass will carry besides the trees.
        """
        depths = [text.drafter.begin(text.context, text.max_depth) for text in texts]
        able = [index for index, depth in enumerate(depths) if depth >= 1]
        found: list[SearchResult | None] = [None] * len(texts)
        paused = False
        if able:
            growth = _Growth(
                self._model, [texts[index] for index in able], [depths[index] for index in able]
            )
            result = self._policy.grow(
                NextTree(
                    search=grow_tree, expand=growth.expand, max_depth=max(growth.depths),
                    pending=pending, texts=len(texts),
                )
            )  # fmt: skip
            paused = not len(result.tree)
            for index, part in zip(able, growth.split(result, self._most_nodes), strict=True):
                found[index] = part
        trees = []
        room = self._tree.budget - sum(len(own.tree) for own in found if own is not None)
        for text, own in zip(texts, found, strict=True):
            size = len(own.tree) if own is not None else 0
            trees.append(text.drafter.take(own, min(size + room, self._most_nodes), paused))
            room -= len(trees[-1]) - size
        return trees

    def observe(self, step: StepResult) -> None:
        """Lets the policy learn from a pass, given as one step of all texts together."""
        self._policy.observe(step)


class _Growth:
    """One search over several texts; keeps which node belongs to which text."""

    def __init__(
        self, model: StreamedModel | None, texts: Sequence[GrowingText], depths: Sequence[int]
    ) -> None:
        self._model = model
        self._texts = texts
        self.depths = depths
        self._owners: dict[int, int] = {}  # index of the text by node id

    def expand(self, frontier: Frontier, width: int) -> tuple[Floats, Ints]:
        """Runs a frontier through the draft model, each text's nodes with its own cache; see
        search.Expand."""
        if frontier.ids[0] == ROOT:
            everyone = range(len(self._texts))
            found = self._run([(text, frontier) for text in everyone], width)
            owners = np.concatenate(
                [np.full(log_probs.shape[1], text) for text, (log_probs, _) in enumerate(found)]
            )
            log_probs, tokens = (np.concatenate(each, axis=1) for each in zip(*found, strict=True))
            kept = np.isfinite(log_probs[0])  # the search numbers these from 0, in this order
            self._owners = dict(enumerate(owners[kept].tolist()))
            return log_probs, tokens
        owners = np.array([self._owner(*pair) for pair in _pairs(frontier)])
        parts = [(text, frontier.part(owners == text)) for text in np.unique(owners).tolist()]
        found = self._run(parts, width)
        columns = max(log_probs.shape[1] for log_probs, _ in found)
        all_log_probs = np.full((len(owners), columns), -np.inf)
        all_tokens = np.zeros((len(owners), columns), dtype=np.int64)
        for (text, part), (log_probs, tokens) in zip(parts, found, strict=True):
            rows = np.flatnonzero(owners == text)
            log_probs = np.where(part.depths[:, None] < self.depths[text], log_probs, -np.inf)
            all_log_probs[rows, : log_probs.shape[1]] = log_probs
            all_tokens[rows, : tokens.shape[1]] = tokens
        return all_log_probs, all_tokens

    def _owner(self, node: int, parent: int) -> int:
        """The text that a node belongs to: its parent's, which is known, since it was expanded
        earlier."""
        if node not in self._owners:
            self._owners[node] = self._owners[parent]
        return self._owners[node]

    def _run(self, parts: Sequence[tuple[int, Frontier]], width: int) -> list[tuple[Floats, Ints]]:
        """The children of each text's nodes.

        Args:
            parts: index of a text, and its nodes of the frontier.
        """
        asked = [(self._texts[text].drafter, part) for text, part in parts]
        rows = [
            each.rows.rows_of(part) for each, part in asked
            if isinstance(each, ModelDrafter) and each.rows.needs_pass(part)
        ]  # fmt: skip
        made = iter(self._model.forward_together(rows) if self._model is not None and rows else ())
        found = []
        for (drafter, part), (text, _) in zip(asked, parts, strict=True):
            try:
                if isinstance(drafter, ModelDrafter):
                    own = next(made) if drafter.rows.needs_pass(part) else None
                    logits = drafter.rows.logits_of(part, own)
                    found.append(drafter.children(part, logits, width))
                else:
                    found.append(drafter.expand(part, width))
            except SpecexecError as error:  # it concerns this text alone, such as a grammar's end
                self._texts[text].error = error
                shape = len(part.ids), 1
                found.append((np.full(shape, -np.inf), np.zeros(shape, dtype=np.int64)))
        return found

    def split(self, result: SearchResult, most: int) -> list[SearchResult]:
        """Splits the search's tree into each text's own, with its `most` most probable nodes."""
        tree, ids = result.tree, result.ids
        parents = [int(ids[parent]) if parent >= 0 else ROOT for parent in tree.parents.tolist()]
        owners = np.array(
            [self._owner(*pair) for pair in zip(ids.tolist(), parents, strict=True)], dtype=np.int64
        )
        found = []
        for text in range(len(self._texts)):
            own = np.flatnonzero(owners == text)
            # of equally probable nodes the older is kept, so a node's parent is kept with it
            own = np.sort(own[np.argsort(-tree.log_probs[own], kind="stable")[:most]])
            renumbered = np.full(len(owners) + 1, ROOT, dtype=np.int64)  # the last is the root's
            renumbered[own] = np.arange(len(own))
            found.append(
                SearchResult(
                    DraftTree(
                        tree.tokens[own],
                        renumbered[tree.parents[own]],
                        tree.depths[own],
                        tree.log_probs[own],
                    ),
                    ids[own],
                )
            )
        return found


def _pairs(frontier: Frontier) -> list[tuple[int, int]]:
    """The (node, parent) ids of a frontier."""
    return list(zip(frontier.ids.tolist(), frontier.parents.tolist(), strict=True))
