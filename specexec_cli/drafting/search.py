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
    tokens, parents, depths, scores = _root_children(expand, config.budget)
    expanded = np.zeros(len(tokens), dtype=bool)
    while True:
        threshold = _kth_best(scores, config.budget)
        # a node at the threshold itself has no child that could displace a kept node
        open_ids = np.flatnonzero(~expanded & (depths < max_depth) & (scores > threshold))
        chosen = open_ids[np.argsort(-scores[open_ids], kind="stable")[: config.batch]]
        if len(chosen) == 0:
            break
        frontier = Frontier(chosen, tokens[chosen], parents[chosen], depths[chosen])
        if worth is not None and not worth.goes_on(scores, frontier):
            break
        child_log_probs, child_tokens = expand(frontier, min(config.budget, _MAX_WIDTH))
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
    return _trim(tokens, parents, depths, scores, size)


def grow_in_rounds(
    expand: Expand, config: TreeConfig, max_depth: int, worth: Worth | None = None
) -> SearchResult:
    """Algorithm 2 of SpecExec (arXiv:2406.02532) as printed: at most D rounds of B nodes each.

    A round takes the best B nodes from the queue into the tree and runs them through the draft
    model; the first round takes the root. Four things follow that `grow_tree` does otherwise: D
    bounds the draft steps; paths have at most D - 1 tokens; the tree has at most (D - 1) B nodes
    however large K is; and nodes that were found but never taken from the queue are not in it.

    Args:
        expand: the draft model. It is not run in round D, since that result would not be used.
        config: budget K, max_depth D and batch B.
        max_depth: longest path that could still be committed, tokens.
        worth: must be None; no policy that uses one suits this search.
    """
    assert worth is None
    tokens, parents, depths, scores = _root_children(expand, config.budget)
    queued = np.ones(len(tokens), dtype=bool)
    taken: list[int] = []  # nodes in the tree, in the order in which they joined it
    for last in range(2, config.max_depth + 1):  # round 1 was the root's
        threshold = _kth_best(scores[taken], config.budget)
        queue = np.flatnonzero(queued & (scores > threshold))
        chosen = queue[np.argsort(-scores[queue], kind="stable")[: config.batch]]
        if len(chosen) == 0:
            break
        queued[chosen] = False
        taken += chosen.tolist()
        chosen = chosen[depths[chosen] < max_depth]
        if last == config.max_depth or len(chosen) == 0:
            continue
        frontier = Frontier(chosen, tokens[chosen], parents[chosen], depths[chosen])
        child_log_probs, child_tokens = expand(frontier, min(config.budget, _MAX_WIDTH))
        child_scores = scores[chosen][:, None] + child_log_probs
        queue = np.flatnonzero(queued)
        best = _best(np.concatenate([scores[queue], child_scores.ravel()]), config.budget)
        queued[queue[~best[: len(queue)]]] = False  # the algorithm's trim(H, K)
        rows, columns = np.nonzero(best[len(queue) :].reshape(child_scores.shape))
        tokens = np.concatenate([tokens, child_tokens[rows, columns]])
        parents = np.concatenate([parents, chosen[rows]])
        depths = np.concatenate([depths, depths[chosen][rows] + 1])
        scores = np.concatenate([scores, child_scores[rows, columns]])
        queued = np.concatenate([queued, np.ones(len(rows), dtype=bool)])
    joined = np.full(len(scores), -np.inf)
    joined[taken] = scores[taken]
    return _trim(tokens, parents, depths, joined, min(config.budget, len(taken)))


# The most children of a node. No useful tree needs more; it bounds the arrays for large budgets.
_MAX_WIDTH = 1024


def _root_children(expand: Expand, budget: int) -> tuple[Ints, Ints, Ints, Floats]:
    """Expands the root: tokens, parents, depths and scores of its children."""
    root = np.array([ROOT], dtype=np.int64)
    frontier = Frontier(root, root, root, np.zeros(1, dtype=np.int64))
    log_probs, tokens = expand(frontier, min(budget, _MAX_WIDTH))
    kept = np.isfinite(log_probs[0])
    count = int(kept.sum())
    return (
        tokens[0][kept],
        np.full(count, ROOT, dtype=np.int64),
        np.ones(count, dtype=np.int64),
        log_probs[0][kept],
    )


def _kth_best(scores: Floats, budget: int) -> float:
    """The budget-th highest score; -inf if there are fewer."""
    if len(scores) < budget:
        return -np.inf
    return float(np.partition(scores, len(scores) - budget)[len(scores) - budget])


def _best(scores: Floats, count: int) -> Bools:
    """Marks the `count` highest finite scores; of equal ones the first."""
    threshold = _kth_best(scores, count)
    marked = scores > threshold
    equal = np.flatnonzero((scores == threshold) & np.isfinite(scores))
    marked[equal[: count - int(marked.sum())]] = True
    return marked


def _trim(tokens: Ints, parents: Ints, depths: Ints, scores: Floats, budget: int) -> SearchResult:
    """Keeps the `budget` best nodes, in insertion order, and renumbers their parents."""
    ids = np.sort(np.argsort(-scores, kind="stable")[:budget]).astype(np.int64)
    renumbered = np.full(len(tokens) + 1, ROOT, dtype=np.int64)  # the last entry is the root's
    renumbered[ids] = np.arange(len(ids))
    return SearchResult(
        DraftTree(tokens[ids], renumbered[parents[ids]], depths[ids], scores[ids]), ids
    )
