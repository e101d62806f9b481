"""Moves the cache rows of accepted nodes to the front: the reference in PyTorch.

rows[:, start + i] = rows[:, kept[i]] for every i, in place, of keys and of values.
"""

from __future__ import annotations

from torch import Tensor


def compact_kv_ref(keys: Tensor, values: Tensor, kept: Tensor, start: int) -> None:
    """Moves the rows of slots `kept` to the slots from `start` on, in every head.

    Args:
        keys, values: (heads, slots, head_dim) each, changed in place.
        kept: (n,) int64 slots in rising order, kept[i] >= start + i.
        start: first slot to write to.
    """
    for rows in (keys, values):
        # index_select copies first, so source and destination may overlap
        rows[:, start : start + kept.shape[0]] = rows.index_select(1, kept)
