"""Which tokens top-p sampling keeps, without sorting a vocabulary, on a CPU.

The nucleus of a peaked distribution is some tens of tokens, and sorting 152 thousand to find them
takes longer than a small model's layers. So the highest scores are sorted alone: scores and not
probabilities, since rounded exponentials may change the order of neighbours. Knows nothing of
sampling.

Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv:1904.09751.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# What sums of a vocabulary's probabilities may be off by, where they are float32: five times the
# most that PyTorch's were, of random logits and up to 262 thousand words.
MARGIN = 2.0**-18
# Tokens down to one of these distances below the highest score are sorted, if they are no more.
_DEPTHS, _MOST_SORTED = np.log(2.0) * np.array([6, 10, 14, 20]), 1 << 13


def nucleus(scores: NDArray[np.float32], top_p: float) -> NDArray[np.int64] | None:
    """The tokens before which, in falling order of scores, less than `top_p` has been summed.

    Args:
        scores: (vocab,) logits; tokens that are excluded already have -inf.
        top_p: above 0 and below 1.
    Returns:
        their ids, rising; None where the rounding of float32 sums might decide otherwise, where the
        order of equal scores does, or where most of the vocabulary would have to be sorted.
    """
    highest = scores.max()
    if not np.isfinite(highest):
        return None
    weights = np.exp(scores - highest)
    total = float(weights.sum(dtype=np.float64))
    for depth in _DEPTHS:
        candidates = np.flatnonzero(scores >= highest - np.float32(depth))
        chances = weights[candidates].astype(np.float64) / total
        if len(candidates) > _MOST_SORTED:
            return None
        if chances.sum() > top_p + MARGIN:
            break
    else:
        return None
    falling = np.argsort(-scores[candidates], kind="stable")
    before = np.concatenate(
        [[0.0], np.cumsum(chances[falling])]
    )  # before each, and behind the last
    count = int(np.searchsorted(before, top_p))
    near = np.abs(before[max(count - 1, 1) : count + 1] - top_p) < MARGIN
    if near.any():
        return None
    found = candidates[falling]
    lowest, others = scores[found[count - 1]], scores[found[count : count + 1]]
    return None if lowest in others else np.sort(found[:count])
