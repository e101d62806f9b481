"""Standard Gumbel noise that is the same in every bit on every machine: the reference in numpy.

A counter-based generator gives integers, and every machine has the same. Of a word w the uniform
number is u = (w // 2^11 + 1/2) / 2^53, and its noise is the float32 nearest to -log(-log(u)).

No library promises how it rounds a logarithm. But a double is off by one unit in the last place at
most, so it decides on the nearest float32 unless the exact value is almost half way between two of
them. That is so for one number in a million. Those are computed with more digits.
"""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

BELOW_ONE = 1.0 - 2.0**-53  # the largest float64 below 1
# What -log(-log(u)) may be off by in float64, per 1 + its size: four times what two logarithms may.
MARGIN = 2.0**-50
_DIGITS = 50
_PART = 1 << 14  # words at once: what is computed of them stays in a core's own cache


def gumbel_noise_ref(seed: int, position: int, count: int) -> NDArray[np.float32]:
    """Standard Gumbel noise of one position.

    The seed is the key of Philox, and the position a word of its counter, so any position is drawn
    without drawing those before it. Raw 64-bit words are used because numpy promises their
    stability across versions. A larger count extends the same sequence.

    Args:
        seed: 0 to 2^64 - 1.
        position: 0 to 2^63 - 1.
    Returns:
        (count,)
    Source: Philox-4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    words = np.random.Philox(key=seed, counter=[0, position, 0, 0]).random_raw(count)
    return gumbel_of(words)


def gumbel_of(words: NDArray[np.uint64], margin: float = MARGIN) -> NDArray[np.float32]:
    """The noise of each word.

    Args:
        margin: tests ask for a larger one, so that more numbers are computed with more digits.
    """
    found = np.empty(len(words), dtype=np.float32)
    for start in range(0, len(words), _PART):
        part = slice(start, start + _PART)
        found[part] = _of_a_part(words[part], margin)
    return found


def _of_a_part(words: NDArray[np.uint64], margin: float) -> NDArray[np.float32]:
    """As gumbel_of.

    From 2^52 on float64 has no halves, so the sum in the uniform number rounds to an even integer.
    For the very last words that is 2^53: the uniform number would be 1 and the noise infinite. So
    uniform numbers are bounded by the largest float64 below 1.
    """
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    np.minimum(uniform, BELOW_ONE, out=uniform)
    noise = -np.log(-np.log(uniform))
    error = (np.abs(noise) + 1.0) * margin
    found = (noise - error).astype(np.float32)
    for index in np.flatnonzero(found != (noise + error).astype(np.float32)).tolist():
        found[index] = _nearest(float(uniform[index]))
    return found


def _nearest(uniform: float) -> np.float32:
    """The float32 nearest to -log(-log(u))."""
    with localcontext(prec=_DIGITS):
        exact = -(-Decimal(uniform).ln()).ln()
        near = np.float32(float(exact))  # or a neighbour is: this was rounded twice
        around = (
            near,
            np.nextafter(near, np.float32(-np.inf)),
            np.nextafter(near, np.float32(np.inf)),
        )
        return min(around, key=lambda each: abs(Decimal(float(each)) - exact))
