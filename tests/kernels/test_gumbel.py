"""Compiled noise, a CPU's and a GPU's, is the reference's in every bit: the nearest float32."""

from __future__ import annotations

import math
from array import array
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from numpy.typing import NDArray
from other_cpu import other_cpu
from specexec_kernels import cpu_gumbel, cpu_jit, gumbel, triton_gumbel
from specexec_kernels.cpu_ir_emit import I32, I64, build_module
from specexec_kernels.gumbel import BELOW_ONE, MARGIN, gumbel_noise_ref, gumbel_of

ALL = 1.0  # a margin with which every number is computed with more digits


def bits(noise: NDArray[np.float32]) -> list[int]:
    return noise.view(np.uint32).tolist()


def drawn(seed: int, position: int, count: int, device: torch.device) -> NDArray[np.float32]:
    out = torch.full((count + 3,), 7.0, device=device)
    triton_gumbel.gumbel_noise(out[:count], seed, position)
    found = out.cpu().numpy()
    assert found[count:].tolist() == [7.0] * 3, "numbers behind the last were touched"
    return found[:count]


@triton.jit
def _of_words(out, words, margin: tl.float64, BLOCK: tl.constexpr, TERMS: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + place).to(tl.uint64, bitcast=True)
    tl.store(out + place, triton_gumbel.noise_of(word, margin, BLOCK, TERMS))


def by_the_kernel(
    words: NDArray[np.uint64], margin: float, device: torch.device
) -> NDArray[np.float32]:
    """What the kernel makes of 256 words."""
    out = torch.empty(len(words), device=device)
    given = torch.from_numpy(words.view(np.int64)).to(device)
    _of_words[(1,)](
        out, given, margin, BLOCK=len(words), TERMS=triton_gumbel.TERMS, enable_fp_fusion=False
    )
    return out.cpu().numpy()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 2**31 - 1, 2**31, 2**40])
def test_every_counter_gives_the_bits_of_the_host(
    seed: int, position: int, device: torch.device
) -> None:
    for count in (1, 3, 256, 1003):
        expected = gumbel_noise_ref(seed, position, count)
        assert bits(drawn(seed, position, count, device)) == bits(expected)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**63 - 1))
def test_any_counter_gives_the_bits_of_the_host(seed: int, position: int) -> None:
    expected = gumbel_noise_ref(seed, position, 1000)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert bits(drawn(seed, position, 1000, device)) == bits(expected)


def tails() -> NDArray[np.uint64]:
    """Words at both ends, about 1/e where the noise is near 0, and anywhere."""
    middle = int(math.exp(-1) * 2**64)
    found = [word << 11 for word in range(40)] + [2**64 - 1 - (word << 11) for word in range(40)]
    found += [2**word for word in range(11, 64)] + [2**64 - 2**word for word in range(11, 64)]
    found += [middle + (word << 11) for word in range(-20, 20)]
    found += np.random.Philox(key=9).random_raw(256 - len(found)).tolist()
    return np.array(found, dtype=np.uint64)


@pytest.mark.parametrize("margin", [MARGIN, ALL])
def test_each_word_has_its_noise_on_a_gpu(margin: float, device: torch.device) -> None:
    """With the margin ALL by pairs of float64 on the one side and by decimals on the other."""
    words = tails()
    assert len(words) == 256
    assert bits(by_the_kernel(words, margin, device)) == bits(gumbel_of(words, ALL))


def test_a_wider_margin_changes_no_number() -> None:
    """The margin is wide enough: what is decided with fewer digits is what more of them decide."""
    words = np.concatenate([np.random.Philox(key=4).random_raw(20_000), tails()])
    expected = gumbel_of(words)
    assert bits(gumbel_of(words, ALL)) == bits(expected)
    # so it is with logarithms that are off by a unit in the last place, as another library's may be
    uniform = np.minimum(((words >> np.uint64(11)).astype(float) + 0.5) * 2.0**-53, BELOW_ONE)
    for first in (-np.inf, np.inf):
        for second in (-np.inf, np.inf):
            inner = np.nextafter(-np.log(uniform), first)
            noise = np.nextafter(-np.log(inner), second)
            error = (np.abs(noise) + 1.0) * MARGIN
            low, high = (noise - error).astype(np.float32), (noise + error).astype(np.float32)
            assert (low <= expected).all()
            assert (expected <= high).all()


def test_the_noise_is_the_nearest_float32() -> None:
    for word in tails()[::7].tolist():
        uniform = min(((word >> 11) + 0.5) * 2.0**-53, BELOW_ONE)
        [found] = gumbel_of(np.array([word], dtype=np.uint64))
        with localcontext(prec=60):
            exact = -(-Decimal(uniform).ln()).ln()
            off = abs(Decimal(float(found)) - exact)
            for end in (-np.inf, np.inf):
                other = float(np.nextafter(found, np.float32(end)))
                assert off <= abs(Decimal(other) - exact)


def test_a_part_and_its_neighbour_are_one_sequence() -> None:
    """Words are taken by parts, whose ends do not show."""
    words = np.random.Philox(key=2).random_raw(gumbel._PART + 9)
    assert bits(gumbel_of(words)[-20:]) == bits(gumbel_of(words[-20:]))


class OfWords(cpu_gumbel.Kernel):
    """The CPU's kernel over given words: the address of a block of them stands for the seed."""

    def drawn(self, counter: Any) -> tuple[Any, Any, Any, Any]:
        b = self.b
        first = b.mul(b.sub(b.extract_element(counter, I32(0)), I64(1)), I64(4))
        words = self.load(
            self.arg[cpu_gumbel.Arg.SEED], first, ir.VectorType(I64, 4 * self.lanes), 8
        )
        places = [self.ints(list(range(at, 4 * self.lanes, 4))) for at in range(4)]
        a, c, d, e = (b.shuffle_vector(words, words, place) for place in places)
        return a, c, d, e


def lanes_here() -> list[int]:
    """64-bit lanes of vectors that this CPU has."""
    return [lanes for lanes in (2, 4, 8) if 2 * lanes <= cpu_jit.lanes()]


@pytest.mark.parametrize("lanes", lanes_here())
def test_each_word_has_its_noise_on_a_cpu(lanes: int) -> None:
    words = np.concatenate([tails(), np.random.Philox(key=3).random_raw(8192 - 256)])
    out = np.empty(len(words), dtype=np.float32)
    spec = cpu_gumbel.GumbelSpec(lanes)
    of_words = cpu_jit.compiled(
        "noise of words", spec,
        lambda name: build_module(name, lambda function: OfWords(spec, function).emit()),
    )  # fmt: skip
    table = array("q", (0, out.ctypes.data, 1, words.ctypes.data, 0))
    of_words(table.buffer_info()[0])
    sure = ~np.isnan(out)
    assert sure.sum() > len(words) - 50
    assert bits(out[sure]) == bits(gumbel_of(words)[sure])


@pytest.mark.parametrize("lanes", lanes_here())
@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_a_cpu_draws_the_bits_of_the_reference(
    seed: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_cpu(monkeypatch, lanes=2 * lanes)
    for position in (0, 1, 2**31, 2**40, 2**63 - 1):
        for count in (1, 3, 1003, 50_001):
            found = cpu_gumbel.gumbel_noise(seed, position, count).numpy()
            assert bits(found) == bits(gumbel_noise_ref(seed, position, count))


def test_what_the_kernel_is_unsure_of_is_computed_with_more_digits() -> None:
    found = cpu_gumbel.gumbel_noise(5, 6, 37, margin=ALL).numpy()
    assert bits(found) == bits(gumbel_noise_ref(5, 6, 37))
