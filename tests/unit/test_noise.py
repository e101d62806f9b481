"""The noise is pinned bit by bit, and right in its tails; any change to it would change texts."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare
from specexec_kernels.gumbel import gumbel_of

from specexec_cli.sampling import gumbel_noise

# (seed, position) -> the first sixteen values, as big-endian float32. A change here changes every
# sampled text of a seed: it needs a line in the changelog.
PINNED = {
    (0, 0): "bfbf6af5beb3c83fbf4931303f0f055b3ebf2c7dbe7e06f24039b3244088869f"
    "bea199e6befb903a3f8a0e41bf3553413f156e6fbe9fde4f3ff730053fa5b61d",
    (7, 11): "3fb8a657bf0f845b3e56ca003fd94d52bf129be83ffa15e83f124d333ea071bc"
    "402ddc90bdf22ddc3f535afe3fe807853f820498ba90b09bbe05f660bd5c6dac",
    (2**32, 4095): "3f3ae27d3eeac8e7bf88dd743ea1c463bdd8a253be46df36bde8c611be937bbb"
    "3f109a07be8290e23f04f419be174c223f909d0cbfb6af5940224fabbefe6d68",
    (2**64 - 1, 2**40): "3fb557213f1caf7c3ed907b73fb19e8b3e6a4da53f0dedefbf0182b53dc8a1c4"
    "3fd93b8e3f1930d83ebb53014056dd503fe427b1bec68c6abf443fecbef94f65",
    (12345, 131071): "3f65dce43f9fbc503f28dba73f530b8e3dd191d1bd6463e83f059338be42da2f"
    "3fd1a823402955833fa85cb83f5ab32a3f5eab353e4de52fbed18d51bf0c1d42",
    (1, 1): "bcd97930be368ebc3fd27e7ebe8cc4673f0db066bf10d7363e0df69c3f0d685a"
    "bc9a1b4f3ff503fa3e8f99edbec40faa3e068e4240236e4e401706ad3e8e1992",
}
# A word of the generator -> its noise, to the ends of both tails.
PINNED_WORDS = {
    0: "c067d691", 2**11 - 1: "c067d691", 2**11: "c065ee7b", 2**40: "c033f049", 2**52: "c00793c3",
    2**63 - 1: "3ebba795", 2**63: "3ebba795", 3 * 2**62: "3f9f79a1",
    2**64 - 2**34: "41a65af6", 2**64 - 2**14: "420aa123", 2**64 - 2**12: "42102cb3",
    2**64 - 2**11 - 1: "42102cb3", 2**64 - 2**11: "4212f27c", 2**64 - 1: "4212f27c",
}  # fmt: skip
LAST = 2**53 - 1  # what the highest words are, without their lower 11 bits


def bits(noise: NDArray[np.float32]) -> str:
    return noise.astype(">f4").tobytes().hex()


def words(*values: int) -> NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize(("seed", "position"), PINNED)
def test_noise_is_pinned_in_bits(seed: int, position: int) -> None:
    assert bits(gumbel_noise(seed, position, 16).numpy()) == PINNED[seed, position]


@pytest.mark.parametrize("word", PINNED_WORDS)
def test_each_word_has_its_noise(word: int) -> None:
    assert bits(gumbel_of(words(word))) == PINNED_WORDS[word]


def unbounded(values: NDArray[np.uint64]) -> NDArray[np.float32]:
    """The definition without the bound, by which the texts of earlier versions were drawn."""
    uniform = ((values >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    with np.errstate(divide="ignore"):  # log 0, in the last word's place
        return (-np.log(-np.log(uniform))).astype(np.float32)


def test_the_bound_changes_the_last_word_alone() -> None:
    """Rounding keeps the order: below a number under 1 there is none that is 1."""
    assert unbounded(words(LAST << 11)) == np.inf
    assert np.isfinite(gumbel_of(words(LAST << 11, (LAST << 11) + 2**11 - 1))).all()
    assert np.isfinite(unbounded(words((LAST << 11) - 1)))
    rising = np.concatenate(
        [
            np.arange(LAST - 10_000, LAST, dtype=np.uint64) << np.uint64(11),
            np.arange(10_000, dtype=np.uint64) << np.uint64(11),
            np.random.Philox(key=5).random_raw(200_000),
        ]
    )
    assert rising.max() < LAST << 11
    assert bits(gumbel_of(rising)) == bits(unbounded(rising))


def exact(word: int) -> float:
    """-log(-log u) for u in the middle of the 2^-53 that the word stands for."""
    uniform = Fraction(2 * (word >> 11) + 1, 2**54)
    half = Fraction(1, 2)
    log = math.log(uniform) if uniform < half else math.log1p(-float(1 - uniform))
    return -math.log(-log)


@pytest.mark.parametrize("exponent", range(8, 45, 4))
def test_far_tails_are_those_of_the_distribution(exponent: int) -> None:
    """Uniform numbers of 24 bits, which float32 has, end at 2^-25 from either side."""
    low, high = 2 ** (64 - exponent), 2**64 - 2 ** (64 - exponent)
    found = gumbel_of(words(low, high))
    assert found.tolist() == pytest.approx([exact(low), exact(high)], rel=1e-4)


@pytest.mark.parametrize(
    ("seed", "position", "token", "expected", "value"),
    [(0, 35, 351_621, "41a4ec5b", 20.6154), (1, 43, 600_273, "c0439b22", -3.0563)],
)
def test_the_tails_arrive(
    seed: int, position: int, token: int, expected: str, value: float
) -> None:
    """Draws of one in 2^29 and 2^30, found by search."""
    drawn = gumbel_noise(seed, position, token + 1).numpy()[token:]
    assert drawn[0] == pytest.approx(value, abs=1e-4)
    assert bits(drawn) == expected


def test_large_values_come_as_often_as_they_should() -> None:
    """Of two million draws, by a chi-square test over the upper and the lower tail."""
    size = 1 << 20
    drawn = np.concatenate([gumbel_noise(11, position, size).numpy() for position in (0, 1)])
    edges = np.array([-np.inf, -2.5, -2.25, -2.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, np.inf])
    observed, _ = np.histogram(drawn, edges)
    with np.errstate(over="ignore"):
        expected = np.diff(np.exp(-np.exp(-edges))) * len(drawn)
    assert expected.min() > 5
    assert chisquare(observed, expected).pvalue > 1e-3
