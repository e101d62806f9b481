"""Which draft nodes attend to which, and the rows of a target pass over a draft tree."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specexec_cli.core import DraftTree
from specexec_cli.models.pass_rows import PassRows


def ancestor_matrix(parents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Ancestry of a tree, each node counted as its own ancestor.

    Args:
        parents: (nodes,), parents[i] < i; -1 marks a child of the root.
    Returns:
        (nodes, nodes) bool, [i, j] is True when j is i or an ancestor of i.
    Raises:
        ValueError: a parent does not precede its child.
    Source: SpecInfer, arXiv:2305.09781, section 4.
    """
    nodes = len(parents)
    if np.any(parents >= np.arange(nodes)) or np.any(parents < -1):
        raise ValueError("a parent does not precede its child")
    matrix = np.eye(nodes, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            matrix[node] |= matrix[parent]
    return matrix


def verification_rows(pending: list[int], tree: DraftTree, prefix_len: int) -> PassRows:
    """The rows of one target pass: pending committed tokens, then every node of the tree.

    Args:
        pending: committed tokens the target's cache lacks; the last one is the tree's root.
        prefix_len: committed tokens in the cache.
    """
    root_position = prefix_len + len(pending) - 1
    positions = root_position + tree.depths
    return PassRows(
        tokens=[*pending, *tree.tokens.tolist()],
        positions=[*range(prefix_len, root_position + 1), *positions.tolist()],
        prefix_len=prefix_len,
        pending=len(pending),
        tree_mask=ancestor_matrix(tree.parents),
        tree_positions=positions,
        parents=np.concatenate(
            # the root, parent -1, is the last pending row
            [np.arange(prefix_len - 1, root_position), root_position + 1 + tree.parents]
        ),
    )
