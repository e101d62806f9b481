"""Move the cache rows of accepted nodes to the front: the reference.

cache[:, start + i] = cache[:, kept[i]] for every i, in place.
"""

from __future__ import annotations

from torch import Tensor


def compact_kv_ref(cache: Tensor, kept: Tensor, start: int) -> None:
    """Keep slots `kept` behind the first `start` slots of every head.

    Args:
        cache: (heads, slots, head_dim), changed in place.
        kept: (n,) int64 slots in rising order, kept[i] >= start + i.
    """
    # index_select copies first, so source and destination may overlap
    cache[:, start : start + kept.shape[0]] = cache.index_select(1, kept)
