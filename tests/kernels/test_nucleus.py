"""The nucleus is transformers' own, and most vocabularies are not sorted for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specexec_kernels.nucleus import nucleus
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper


def expected(scores: Tensor, top_p: float) -> list[int]:
    kept = TopPLogitsWarper(top_p)(torch.empty(1, 0, dtype=torch.int64), scores[None])[0]
    return torch.isfinite(kept).nonzero().flatten().tolist()


def check(scores: Tensor, top_p: float) -> bool:
    """Compares with transformers; returns whether the tokens were told."""
    found = nucleus(scores.numpy(), top_p)
    if found is not None:
        assert found.tolist() == expected(scores, top_p)
    return found is not None


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), vocab=st.sampled_from([1, 2, 40, 1000, 30_000]),
    spread=st.sampled_from([0.5, 2.0, 6.0, 40.0]), excluded=st.booleans(),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.95, 0.999]),
)  # fmt: skip
def test_the_tokens_are_those_of_transformers(
    seed: int, vocab: int, spread: float, excluded: bool, top_p: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(vocab, generator=draw)
    if excluded:
        scores[torch.randint(vocab, (vocab // 2,), generator=draw)] = -torch.inf
        scores[0] = 1.0
    check(scores, top_p)


def test_a_peaked_distribution_is_told_without_sorting_it_whole() -> None:
    told = [
        check(6 * torch.randn(50_000, generator=torch.Generator().manual_seed(seed)), 0.9)
        for seed in range(40)
    ]
    assert sum(told) >= 38


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_sums_on_the_border_are_left_to_transformers(top_p: float) -> None:
    """Of tokens of one, two and five eighths, and of two that are far from it."""
    eighths = np.log(np.array([5, 2, 1], np.float32))
    assert nucleus(eighths, 0.625) is None
    assert nucleus(eighths, 0.62).tolist() == [0]
    assert nucleus(eighths, 0.63).tolist() == [0, 1]
    assert nucleus(np.zeros(4, np.float32), top_p) is None
    assert nucleus(np.array([3.0, 0.0], np.float32), top_p).tolist() == [0]


def test_equal_tokens_are_kept_together_or_left_to_transformers() -> None:
    scores = np.array([2.0, 1.0, 1.0, 0.0], np.float32)
    assert nucleus(scores, 0.55) is None  # one of both, and which one only the sort says
    assert nucleus(scores, 0.85).tolist() == [0, 1, 2]


def test_tokens_are_sorted_by_scores_that_rounded_exponentials_would_swap() -> None:
    row = torch.full((1000,), -30.0)
    row[:3] = torch.tensor([0.0, -1.732868, -1.7328681])
    assert row[1] > row[2]
    assert check(row, 0.8)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_are_left_to_transformers(odd: float) -> None:
    scores = np.array([1.0, odd, 0.0], np.float32)
    found = nucleus(scores, 0.5)
    assert found is None if odd != -np.inf else found.tolist() == [0]
    assert nucleus(np.full(3, -np.inf, np.float32), 0.5) is None


def test_a_flat_vocabulary_is_left_to_transformers() -> None:
    scores = torch.randn(40_000, generator=torch.Generator().manual_seed(1))
    assert nucleus(scores.numpy(), 0.9) is None
