"""Packing: golden words, round trips, and the ways zero points are stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specexec_kernels import packing

GOLDEN = {
    2: ["E4E4E4E4", "E4E4E4E4"],
    3: ["88FAC688", "C688FAC6", "FAC688FA"],
    4: ["76543210", "FEDCBA98", "76543210", "FEDCBA98"],
    8: [f"{k + 3:02X}{k + 2:02X}{k + 1:02X}{k:02X}" for k in range(0, 32, 4)],
}


def as_hex(words: torch.Tensor) -> list[str]:
    return [f"{word & 0xFFFFFFFF:08X}" for word in words.flatten().tolist()]


@pytest.mark.parametrize("bits", packing.BITS)
def test_golden_words(bits: int) -> None:
    codes = (torch.arange(32) % 2**bits)[:, None]
    assert as_hex(packing.pack_rows(codes, bits)) == GOLDEN[bits]


def test_golden_word_awq() -> None:
    assert as_hex(packing.pack_awq(torch.arange(8)[None])) == ["75316420"]


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from(packing.BITS),
    runs=st.integers(1, 3),
    columns=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip(bits: int, runs: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(0, 2**bits, (32 * runs, columns)))
    words = packing.pack_rows(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (bits * runs, columns)
    assert torch.equal(packing.unpack_rows(words, bits).long(), codes)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 4), words=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_round_trip_awq(rows: int, words: int, seed: int) -> None:
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 16, (rows, 8 * words)))
    assert torch.equal(packing.unpack_awq(packing.pack_awq(codes)).long(), codes)


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from(packing.BITS), v1=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_zero_points_come_back(bits: int, v1: bool, seed: int) -> None:
    """Also those of 0, whose stored field borrowed from the next one."""
    rng = np.random.default_rng(seed)
    zeros = torch.from_numpy(rng.integers(0, 2**bits, (3, 64)) * rng.integers(0, 2, (3, 64)))
    stored = packing.store_zeros(zeros, bits, minus_one=v1)
    assert torch.equal(packing.unpack_zeros(stored, bits, minus_one=v1).long(), zeros)


def test_v1_zero_borrows_from_the_next_field() -> None:
    """What GPTQModel writes for zero points 0, 1, 8, ...: whole words minus 0x11111111."""
    zeros = torch.tensor([[0, 1, 8, 8, 8, 8, 8, 8]])
    assert as_hex(packing.store_zeros(zeros, 4, minus_one=True)) == [
        f"{0x88888810 - 0x11111111:08X}"
    ]
