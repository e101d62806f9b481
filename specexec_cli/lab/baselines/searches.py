"""Searches that SpecExec's is compared with: chains, bundles, beams, and its paper's rounds.

All but the rounds grow a tree level by level, with one draft step for each level. `width` is
budget // max_depth, so that a full tree has at most `budget` nodes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.drafting.search import (
    MAX_WIDTH,
    ROOT,
    Expand,
    Floats,
    Frontier,
    Ints,
    SearchResult,
    Worth,
    kth_best,
    root_children,
    trim,
)

# Given the scores (parents, children) of a level, -inf where there is no child, says which join.
_Choose = Callable[[Floats], NDArray[np.bool_]]


def grow_chain(
    expand: Expand, config: TreeConfig, max_depth: int, worth: Worth | None = None
) -> SearchResult:
    """One path: each node's first child.

    Source: Leviathan et al., arXiv:2211.17192, algorithm 1.
    """
    length = min(config.budget, max_depth)
    return _grow_levels(expand, lambda level: 1, np.isfinite, length, worth)


def grow_bundle(
    expand: Expand, config: TreeConfig, max_depth: int, worth: Worth | None = None
) -> SearchResult:
    """`width` children of the root, and one path below each of them.

    Source: SpecInfer's expansion <w, 1, 1, ...>, as in SpecExec's reference code
    (specdec/spec_SI.py).
    """
    width = _width(config)
    return _grow_levels(
        expand, lambda level: width if level == 0 else 1, np.isfinite, max_depth, worth
    )


def grow_beam(
    expand: Expand, config: TreeConfig, max_depth: int, worth: Worth | None = None
) -> SearchResult:
    """Beam search with `width` beams; every node that was ever in a beam stays in the tree."""
    width = _width(config)
    return _grow_levels(
        expand, lambda level: width, lambda scores: _best(scores, width), max_depth, worth
    )


def grow_beam_pruned(
    expand: Expand, config: TreeConfig, max_depth: int, worth: Worth | None = None
) -> SearchResult:
    """Beam search that keeps only the final beams and their ancestors, as beam decoding does."""
    tree = grow_beam(expand, config, max_depth, worth).tree
    kept = tree.depths == tree.depths.max(initial=0)
    for node in range(len(tree) - 1, -1, -1):
        if kept[node] and tree.parents[node] != ROOT:
            kept[tree.parents[node]] = True
    ids = np.flatnonzero(kept).astype(np.int64)
    renumbered = np.full(len(tree) + 1, ROOT, dtype=np.int64)  # last entry: the root's own
    renumbered[ids] = np.arange(len(ids))
    parents = renumbered[tree.parents[ids]]
    return SearchResult(
        DraftTree(tree.tokens[ids], parents, tree.depths[ids], tree.log_probs[ids]), ids
    )


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
    tokens, parents, depths, scores = root_children(expand, config.budget)
    queued = np.ones(len(tokens), dtype=bool)
    taken: list[int] = []  # nodes in the tree, in the order in which they joined it
    for last in range(2, config.max_depth + 1):  # round 1 was the root's
        threshold = kth_best(scores[taken], config.budget)
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
        child_log_probs, child_tokens = expand(frontier, min(config.budget, MAX_WIDTH))
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
    return trim(tokens, parents, depths, joined, min(config.budget, len(taken)))


def _width(config: TreeConfig) -> int:
    return max(1, config.budget // config.max_depth)


def _best(scores: Floats, count: int) -> NDArray[np.bool_]:
    """Marks the `count` highest finite scores of an array of any shape; of equal ones the first."""
    order = np.argsort(-scores, axis=None, kind="stable")[:count]
    chosen = np.zeros(scores.size, dtype=bool)
    chosen[order] = True
    return chosen.reshape(scores.shape) & np.isfinite(scores)


def _grow_levels(
    expand: Expand,
    width: Callable[[int], int],
    choose: _Choose,
    max_depth: int,
    worth: Worth | None,
) -> SearchResult:
    """Grows up to `max_depth` levels; a node's id is its index in the tree.

    Args:
        expand: the draft model.
        width: children to ask for per node of a level; the root is level 0.
        choose: says which of the scored children join the tree.
        max_depth: longest path, tokens.
        worth: may end the growth earlier.
    """
    root = np.array([ROOT], dtype=np.int64)
    frontier, frontier_scores = Frontier(root, root, root, np.zeros(1, dtype=np.int64)), np.zeros(1)
    levels: list[tuple[Frontier, Floats]] = []
    count = 0
    for level in range(max_depth):
        if level and worth is not None:
            found = np.concatenate([scores for _, scores in levels])
            if not worth.goes_on(found, frontier):
                break
        log_probs, tokens = expand(frontier, width(level))
        scores = frontier_scores[:, None] + log_probs
        rows, columns = np.nonzero(choose(scores))
        if len(rows) == 0:
            break
        ids = np.arange(count, count + len(rows), dtype=np.int64)
        depths = np.full(len(rows), level + 1, dtype=np.int64)
        frontier = Frontier(ids, tokens[rows, columns], frontier.ids[rows], depths)
        frontier_scores = scores[rows, columns]
        levels.append((frontier, frontier_scores))
        count += len(rows)
    if not levels:
        return SearchResult(DraftTree.empty(), np.zeros(0, dtype=np.int64))
    tree = DraftTree(
        _joined([nodes.tokens for nodes, _ in levels]),
        _joined([nodes.parents for nodes, _ in levels]),
        _joined([nodes.depths for nodes, _ in levels]),
        np.concatenate([scores for _, scores in levels]),
    )
    return SearchResult(tree, np.arange(count, dtype=np.int64))


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts)
