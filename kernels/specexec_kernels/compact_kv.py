"""Moves the cache rows of accepted nodes to the front: the reference in PyTorch.

cache[:, start + i] = cache[:, kept[i]] for every i, in place.
"""

from __future__ import annotations

from torch import Tensor


def compact_kv_ref(cache: Tensor, kept: Tensor, start: int) -> None:
    """Moves the rows of slots `kept` to the slots from `start` on, in every head.

    Args:
        cache: (heads, slots, head_dim), changed in place.
        kept: (n,) int64 slots in rising order, kept[i] >= start + i.
        start: first slot to write to.
    """
    # index_select copies first, so source and destination may overlap
    cache[:, start : start + kept.shape[0]] = cache.index_select(1, kept)
