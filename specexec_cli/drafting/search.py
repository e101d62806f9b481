"""Batched best-first search for the most probable continuations. Imports no torch.

Growing the tree is a single-source shortest-path problem: an edge costs -log(draft probability), so
the K most probable prefixes are the K nearest nodes, and Dijkstra's order finds them without
expanding the rest.

Source: SpecExec, arXiv:2406.02532, section 4.2, appendix A and algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree

ROOT = -1

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes to run through the draft model in one batch. All arrays are (n,).

    The first frontier of a search has only the root: id -1, token -1, parent -1, depth 0.
    """

    ids: Ints
    tokens: Ints
    parents: Ints
    depths: Ints

    @classmethod
    def root(cls) -> Frontier:
        """The frontier that begins a search."""
        root = np.array([ROOT], dtype=np.int64)
        return cls(root, root, root, np.zeros(1, dtype=np.int64))

    def part(self, chosen: NDArray[np.bool_]) -> Frontier:
        """Some of the nodes."""
        return Frontier(
            self.ids[chosen], self.tokens[chosen], self.parents[chosen], self.depths[chosen]
        )


# expand(frontier, width) gives log-probabilities (n, width) and tokens (n, width) of each node's
# best children, the best first. There may be fewer columns, as for a small vocabulary.
Expand = Callable[[Frontier, int], tuple[Floats, Ints]]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The tree, and for each of its nodes the id that it had in the search's frontiers."""

    tree: DraftTree
    ids: Ints


class Worth(Protocol):
    """Says when a tree is large enough; see drafting/policies/."""

    def goes_on(self, log_probs: Floats, frontier: Frontier) -> bool:
        """Whether to run the frontier through the draft model too.

        Args:
            log_probs: cumulative log-probabilities of all nodes found so far, by their ids.
            frontier: the nodes that would be run next.
        """

    def size(self, log_probs: Floats) -> int:
        """How many of all nodes found to keep, at least 1. Only the best-first search asks."""


# search(expand, config, max_depth, worth) finds a tree of at most `config.budget` nodes and
# `max_depth` levels.
Search = Callable[[Expand, TreeConfig, int, Worth | None], SearchResult]


def grow_tree(
    expand: Expand,
    config: TreeConfig,
    max_depth: int,
    worth: Worth | None = None,
) -> SearchResult:
    """Finds the `config.budget` most probable continuations of at most `max_depth` tokens.

    In each step the best `config.batch` unexpanded nodes go through `expand` together. Children are
    never more probable than their parent, so the search ends when no unexpanded node beats the
    budget-th best node found: the result is that of an exhaustive search. Of equally probable nodes
    the older is kept, so a node's parent is always kept with it.

    Args:
        expand: the draft model.
        config: budget K and batch B.
        max_depth: longest path D, tokens; at least 1.
        worth: may end the search and trim the tree earlier than the budget does.
    """
    tokens, parents, depths, scores = root_children(expand, config.budget)
    expanded = np.zeros(len(tokens), dtype=bool)
    while True:
        threshold = kth_best(scores, config.budget)
        # a node at the threshold itself has no child that could displace a kept node
        open_ids = np.flatnonzero(~expanded & (depths < max_depth) & (scores > threshold))
        chosen = open_ids[np.argsort(-scores[open_ids], kind="stable")[: config.batch]]
        if len(chosen) == 0:
            break
        frontier = Frontier(chosen, tokens[chosen], parents[chosen], depths[chosen])
        if worth is not None and not worth.goes_on(scores, frontier):
            break
        child_log_probs, child_tokens = expand(frontier, min(config.budget, MAX_WIDTH))
        expanded[chosen] = True
        child_scores = scores[chosen][:, None] + child_log_probs
        rows, columns = np.nonzero(np.isfinite(child_scores) & (child_scores > threshold))
        tokens = np.concatenate([tokens, child_tokens[rows, columns]])
        parents = np.concatenate([parents, chosen[rows]])
        depths = np.concatenate([depths, depths[chosen][rows] + 1])
        scores = np.concatenate([scores, child_scores[rows, columns]])
        expanded = np.concatenate([expanded, np.zeros(len(rows), dtype=bool)])
    size = config.budget
    if worth is not None and len(scores):
        size = min(worth.size(scores), config.budget)
    return trim(tokens, parents, depths, scores, size)


# The most children of a node. No useful tree needs more; it bounds the arrays for large budgets.
MAX_WIDTH = 1024


def root_children(expand: Expand, budget: int) -> tuple[Ints, Ints, Ints, Floats]:
    """Expands the root: tokens, parents, depths and scores of its children."""
    log_probs, tokens = expand(Frontier.root(), min(budget, MAX_WIDTH))
    kept = np.isfinite(log_probs[0])
    count = int(kept.sum())
    return (
        tokens[0][kept],
        np.full(count, ROOT, dtype=np.int64),
        np.ones(count, dtype=np.int64),
        log_probs[0][kept],
    )


def kth_best(scores: Floats, budget: int) -> float:
    """The budget-th highest score; -inf if there are fewer."""
    if len(scores) < budget:
        return -np.inf
    return float(np.partition(scores, len(scores) - budget)[len(scores) - budget])


def trim(tokens: Ints, parents: Ints, depths: Ints, scores: Floats, budget: int) -> SearchResult:
    """Keeps the `budget` best nodes, in insertion order, and renumbers their parents."""
    ids = np.sort(np.argsort(-scores, kind="stable")[:budget]).astype(np.int64)
    renumbered = np.full(len(tokens) + 1, ROOT, dtype=np.int64)  # the last entry is the root's
    renumbered[ids] = np.arange(len(ids))
    return SearchResult(
        DraftTree(tokens[ids], renumbered[parents[ids]], depths[ids], scores[ids]), ids
    )
