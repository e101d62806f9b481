"""Rejection sampling: keeps a draft token with the probability that preserves the distribution.

The text then follows the target's distribution. It is not the very text of autoregressive decoding
with the same seed; with verify/accept.py it is.

Source: Leviathan et al., arXiv:2211.17192, algorithm 1; several drafts of a position: Miao et al.
(SpecInfer), arXiv:2305.09781, algorithm 2; without replacement: Jeon et al., arXiv:2402.14160.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specexec_cli.sampling import uniforms

Probs = NDArray[np.float64]  # (vocab,), sums to 1

# Independent sequences of random numbers at one position.
DRAFT_STREAM, _ACCEPT_STREAM, _RESIDUAL_STREAM = 1, 2, 3


def draw(probs: Probs, uniform: float) -> int:
    """The token at which the cumulative distribution passes `uniform`, in (0, 1)."""
    cumulative = np.cumsum(probs)
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # rounding may carry the product up to the total, past which there is no token
    return min(token, int(np.flatnonzero(probs)[-1]))


def settle(
    target_probs: Probs,
    proposal: Probs,
    tokens: Sequence[int],
    seed: int,
    position: int,
) -> tuple[int, int | None]:
    """The token of one position: a draft token that is kept, or one drawn for the target.

    Args:
        target_probs: (vocab,), the target's distribution at the position.
        proposal: (draft vocab,), the distribution that the first draft token was drawn from.
        tokens: draft tokens of the position, drawn one after another without replacement.
    Returns:
        The token, and its index in `tokens`, or None if no draft token was kept.
    """
    draft_probs = np.zeros(len(target_probs))
    draft_probs[: len(proposal)] = proposal / proposal.sum()
    tests = uniforms(seed, position, _ACCEPT_STREAM, len(tokens))
    for number, (token, uniform) in enumerate(zip(tokens, tests.tolist(), strict=True)):
        if uniform * draft_probs[token] < target_probs[token]:
            return token, number
        residual = np.maximum(target_probs - draft_probs, 0.0)
        if residual.sum() > 0:  # a rejection leaves some, except by rounding
            target_probs = residual / residual.sum()
        draft_probs[token] = 0.0
        draft_probs /= max(draft_probs.sum(), np.finfo(np.float64).tiny)
    return draw(target_probs, float(uniforms(seed, position, _RESIDUAL_STREAM, 1)[0])), None
