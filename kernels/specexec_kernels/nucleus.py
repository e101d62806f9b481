"""Which tokens top-p sampling keeps, without sorting a vocabulary, on a CPU.

The nucleus of a peaked distribution is some tens of tokens, and sorting 152 thousand to find them
takes longer than a small model's layers. So those that may belong to it are found by their
probabilities and sorted alone. Knows nothing of sampling.

Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv:1904.09751.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# What sums of a vocabulary's probabilities may be off by, where they are float32: five times the
# most that PyTorch's were, of random logits and up to 262 thousand words.
MARGIN = 2.0**-18
# Tokens above one of these shares of the highest probability are sorted, if they are no more.
_SHARES, _MOST_SORTED = (2.0**-6, 2.0**-10, 2.0**-14, 2.0**-20), 1 << 13


def nucleus(scores: NDArray[np.float32], top_p: float) -> NDArray[np.int64] | None:
    """The tokens before which, in falling order of probability, less than `top_p` has been summed.

    Args:
        scores: (vocab,) logits; tokens that are excluded already have -inf.
        top_p: above 0 and below 1.
    Returns:
        their ids, rising; None where the rounding of float32 sums might decide otherwise, where
        equal probabilities do, or where most of the vocabulary would have to be sorted.
    """
    highest = scores.max()
    if not np.isfinite(highest):
        return None
    weights = np.exp(scores - highest)
    total = float(weights.sum(dtype=np.float64))
    for share in _SHARES:
        candidates = np.flatnonzero(weights >= share)
        chances = weights[candidates].astype(np.float64) / total
        if len(candidates) > _MOST_SORTED:
            return None
        if chances.sum() > top_p + MARGIN:
            break
    else:
        return None
    falling = np.argsort(-chances, kind="stable")
    before = np.concatenate(
        [[0.0], np.cumsum(chances[falling])]
    )  # before each, and behind the last
    count = int(np.searchsorted(before, top_p))
    near = np.abs(before[max(count - 1, 1) : count + 1] - top_p) < MARGIN
    if near.any():
        return None
    kept, others = chances[falling[count - 1]], chances[falling[count : count + 1]]
    return None if kept in others else np.sort(candidates[falling[:count]])
