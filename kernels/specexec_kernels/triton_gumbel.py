# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Gumbel noise in Triton, in every bit that of gumbel.gumbel_noise_ref.

Nothing is read and nothing is uploaded, so no position waits for the CPU. Where a logarithm in
float64 does not decide on the nearest float32, a block computes it again in pairs of float64, whose
sum has 106 bits. Sums and products must not be fused: launches say so.

Source: pairs: Dekker, "A floating-point technique for extending the available precision", 1971.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specexec_kernels.gumbel import BELOW_ONE, MARGIN

_BLOCK = 256  # words of a program
TERMS = 22  # of the series in `_log_of_pair`: the next one is below 2^-110
_BELOW_ONE: tl.constexpr = tl.constexpr(BELOW_ONE)
# log(2) as a pair
_LOG_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_LOG_2_REST: tl.constexpr = tl.constexpr(2.3190468138462996e-17)
# of Philox-4x64: two multipliers, and what is added to the two halves of the key after each round
_MULTIPLIERS: tl.constexpr = tl.constexpr((0xD2E7470EE14C6C93, 0xCA5A826395121157))
_ADDED: tl.constexpr = tl.constexpr((0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B))


@triton.jit
def _words(seed, position, place, BLOCK: tl.constexpr):
    """The words of a position at these places: four of each value of the counter's first word."""
    none = tl.zeros((BLOCK,), tl.uint64)
    a, b, c, d = none + (place // 4 + 1).to(tl.uint64), none + position.to(tl.uint64), none, none
    key, other = none + seed.to(tl.uint64), none
    by_a = tl.full((BLOCK,), _MULTIPLIERS[0], tl.uint64)
    by_c = tl.full((BLOCK,), _MULTIPLIERS[1], tl.uint64)
    for _ in tl.static_range(10):
        high_a, low_a = tl.umulhi(a, by_a), a * by_a
        high_c, low_c = tl.umulhi(c, by_c), c * by_c
        a, b, c, d = high_c ^ b ^ key, low_c, high_a ^ d ^ other, low_a
        key += tl.full((BLOCK,), _ADDED[0], tl.uint64)
        other += tl.full((BLOCK,), _ADDED[1], tl.uint64)
    which = place % 4
    return tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))


@triton.jit
def _ordered_sum(a, b):
    """a + b as a pair, for |a| >= |b|."""
    total = a + b
    return total, b - (total - a)


@triton.jit
def _sum(a, b):
    """a + b as a pair."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@triton.jit
def _product(a, b):
    """a * b as a pair; 2^27 + 1 splits a number into two of 26 bits."""
    total = a * b
    wide_a, wide_b = a * 134217729.0, b * 134217729.0
    high_a, high_b = wide_a - (wide_a - a), wide_b - (wide_b - b)
    low_a, low_b = a - high_a, b - high_b
    return total, ((high_a * high_b - total) + high_a * low_b + low_a * high_b) + low_a * low_b


@triton.jit
def _add(a, a_rest, b, b_rest):
    total, rest = _sum(a, b)
    low, low_rest = _sum(a_rest, b_rest)
    total, rest = _ordered_sum(total, rest + low)
    return _ordered_sum(total, rest + low_rest)


@triton.jit
def _multiply(a, a_rest, b, b_rest):
    total, rest = _product(a, b)
    return _ordered_sum(total, rest + (a * b_rest + a_rest * b))


@triton.jit
def _divide(a, a_rest, b, b_rest):
    first = a / b
    by, by_rest = _multiply(b, b_rest, first, first * 0.0)
    a, a_rest = _add(a, a_rest, -by, -by_rest)
    second = a / b
    by, by_rest = _multiply(b, b_rest, second, second * 0.0)
    a, a_rest = _add(a, a_rest, -by, -by_rest)
    total, rest = _ordered_sum(first, second)
    return _ordered_sum(total, rest + a / b)


@triton.jit
def _log_of_pair(x, rest, TERMS: tl.constexpr):
    """log(x + rest) as a pair, from log(m) = 2 (s + s^3 / 3 + ...) with s = (m - 1) / (m + 1)."""
    exponent = ((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1023
    # m, between sqrt(1/2) and sqrt(2), and the power of two that is left
    scaled = x * ((1023 - exponent) << 52).to(tl.float64, bitcast=True)
    exponent = tl.where(scaled > 1.4142135623730951, exponent + 1, exponent)
    scale = ((1023 - exponent) << 52).to(tl.float64, bitcast=True)
    x, rest = x * scale, rest * scale
    one, none = x * 0.0 + 1.0, x * 0.0
    above, above_rest = _add(x, rest, -one, none)
    below, below_rest = _add(x, rest, one, none)
    s, s_rest = _divide(above, above_rest, below, below_rest)
    square, square_rest = _multiply(s, s_rest, s, s_rest)
    total, total_rest = none, none
    for term in range(TERMS):
        total, total_rest = _multiply(total, total_rest, square, square_rest)
        odd = one * (2 * TERMS - 1 - 2 * term)
        part, part_rest = _divide(one, none, odd, none)
        total, total_rest = _add(total, total_rest, part, part_rest)
    total, total_rest = _multiply(total, total_rest, 2.0 * s, 2.0 * s_rest)
    power = exponent.to(tl.float64)
    twos, twos_rest = _multiply(power, none, one * _LOG_2, one * _LOG_2_REST)
    return _add(twos, twos_rest, total, total_rest)


@triton.jit
def _rounded_once(x, rest):
    """The float32 nearest to x + rest: x is made odd unless it is exact, which marks its side."""
    bits = x.to(tl.int64, bitcast=True)
    away = tl.where((rest > 0) == (x > 0), 1, -1)
    bits = tl.where(((bits & 1) == 0) & (rest != 0), bits + away, bits)
    return bits.to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def noise_of(word, margin, BLOCK: tl.constexpr, TERMS: tl.constexpr):
    """The noise of a block of words; see gumbel_of."""
    uniform = ((word >> 11).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
    uniform = tl.minimum(uniform, tl.full((BLOCK,), _BELOW_ONE, tl.float64))
    noise = -tl.log(-tl.log(uniform))
    error = (tl.abs(noise) + 1.0) * margin
    found = (noise - error).to(tl.float32)
    unsure = found != (noise + error).to(tl.float32)
    if tl.max(unsure.to(tl.int32), axis=0) > 0:
        log, rest = _log_of_pair(uniform, uniform * 0.0, TERMS)
        log, rest = _log_of_pair(-log, -rest, TERMS)
        found = tl.where(unsure, _rounded_once(-log, -rest), found)
    return found


@triton.jit(do_not_specialize=["seed", "position", "count"])
def _gumbel_kernel(
    out, seed: tl.uint64, position: tl.uint64, count, margin: tl.float64,
    BLOCK: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = _words(seed, position, place, BLOCK)
    tl.store(out + place, noise_of(word, margin, BLOCK, TERMS), mask=place < count)


def gumbel_noise(out: Tensor, seed: int, position: int, margin: float = MARGIN) -> None:
    """Writes the noise of one position; see gumbel_noise_ref.

    Args:
        out: (count,) float32, contiguous.
        seed: 0 to 2^64 - 1.
        position: 0 to 2^63 - 1.
        margin: see gumbel_of.
    """
    count = out.shape[0]
    _gumbel_kernel[(triton.cdiv(count, _BLOCK),)](
        out, seed, position, count, margin, BLOCK=_BLOCK, TERMS=TERMS, enable_fp_fusion=False,
    )  # fmt: skip
