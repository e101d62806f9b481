"""Attention of draft-tree rows over the cached prefix and their ancestors: the reference.

A row sees the positions from its first one (0 without a sliding window) to its own. Below the tree
a position lies in the slot of the same number; a node's ancestors lie wherever the tree has them.
So a mask is four numbers a row, and the slots of its path: 256 nodes of 32 levels take 37 KB,
where a float32 mask would take (prefix + 256) * 256 * 4 bytes.

Source: tree attention of SpecInfer, arXiv:2305.09781, section 4; soft-capped scores of Gemma 2,
arXiv:2408.00118, section 2; sinks of gpt-oss, arXiv:2508.10925, section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

COLUMNS = 4  # of TreeMask.table, before the slots of a path


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Which slots each row sees.

    Attributes:
        table: (rows, 4 + levels) int32. The row's own position; the first position that it sees;
            how many positions, from 0 on, lie in slots of their own number, at least the tree's
            start or all up to its own; the tree's start, which is the first position that several
            slots may stand for; then the slots of the positions from there on, as far as the row's
            own.
        about: the tree's start, or about as much: how rows are shared out follows from it, and no
            row's result.
    """

    table: Tensor
    about: int

    @property
    def levels(self) -> int:
        """The longest path from the tree's start on, or more; 0 where every slot is in place."""
        return self.table.shape[1] - COLUMNS

    def seen(self, slots: int) -> Tensor:
        """The mask in full: (rows, slots) bool, True = attend."""
        own, first, in_place, tree_start = self.table[:, :COLUMNS].long().unbind(1)
        at = torch.arange(slots, device=self.table.device)
        seen = (at >= first[:, None]) & (at < torch.minimum(in_place, own + 1)[:, None])
        position = tree_start[:, None] + torch.arange(self.levels, device=self.table.device)
        moved = (position >= torch.maximum(in_place, first)[:, None]) & (position <= own[:, None])
        row, level = torch.nonzero(moved, as_tuple=True)
        seen[row, self.table[row, COLUMNS + level].long()] = True
        return seen


def tree_mask(
    chain: NDArray[np.integer[Any]],
    nodes: NDArray[np.bool_],
    tree_start: int,
    first: NDArray[np.integer[Any]] | int = 0,
) -> TreeMask:
    """The mask of some rows in their places and the nodes of a tree behind them, on the CPU.

    Args:
        chain: (rows,) positions of rows whose slots have the same number, as all before them.
        nodes: (nodes, slots) which slots from `tree_start` on each node sees: its ancestors in
            rising order, and itself.
        tree_start: the position of a node without a parent in the tree.
        first: (rows + nodes,) the first position that each row sees.
    """
    row, slot = np.nonzero(nodes)  # row by row
    depths = np.count_nonzero(nodes, axis=1)
    level = np.arange(len(row)) - np.repeat(np.cumsum(depths) - depths, depths)
    moved = slot != level
    levels = depths.max(initial=0) if moved.any() else 0
    table = np.zeros((len(chain) + len(nodes), COLUMNS + levels), dtype=np.int32)
    table[:, 0] = np.concatenate([chain, tree_start + depths - 1])
    table[:, 1] = first
    table[:, 2] = table[:, 0] + 1
    table[:, 3] = tree_start
    of_nodes = table[len(chain) :]
    np.minimum.at(of_nodes[:, 2], row[moved], tree_start + level[moved])
    if levels:
        of_nodes[row, COLUMNS + level] = tree_start + slot
    return TreeMask(torch.from_numpy(table), tree_start)


def tree_attention_ref(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: TreeMask,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over the prefix and each row's ancestors, with a dense mask.

    Args:
        queries: (rows, heads, head_dim); consecutive heads share a key/value head.
        keys: (kv_heads, slots, head_dim).
        values: (kv_heads, slots, value_dim).
        mask: of the rows, each of which sees at least one slot.
        scale: multiplies the scores; 1 / sqrt(head_dim) where not given.
        softcap: the scores become softcap * tanh(score / softcap).
        sinks: (heads,) logits that take part in the softmax alone, without a value.
    Returns:
        (rows, heads, value_dim) in the dtype of `queries`.
    """
    rows, slots, group = queries.shape[0], keys.shape[1], queries.shape[1] // keys.shape[0]
    scores = torch.einsum("rhd,hsd->hrs", queries, keys.repeat_interleave(group, 0))
    scores = scores.float() * (scale or 1 / math.sqrt(queries.shape[2]))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask.seen(slots), -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, rows, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., :slots].to(values.dtype)
    return torch.einsum("hrs,hsd->rhd", weights, values.repeat_interleave(group, 0))
