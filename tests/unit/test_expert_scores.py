"""Scores of experts: how valuable each is to keep, and how likely it is to be needed."""

from __future__ import annotations

import numpy as np
import pytest

from specexec_cli.offload.expert_scores import DECAY, RECENT_DECAY, ExpertScores


def test_worth_is_the_share_of_many_rows_and_that_of_the_last_ones() -> None:
    scores, rng = ExpertScores(2, 6, 2), np.random.default_rng(0)
    shares = np.zeros((2, 6))
    rates = np.array([[DECAY], [RECENT_DECAY]])
    for _ in range(50):
        chosen = rng.choice(6, 2, replace=False)
        scores.used(1, [(int(expert), 1) for expert in chosen], 1)
        shares *= rates
        shares[:, chosen] += 1.0 - rates
    assert scores.worth[1] == pytest.approx(shares.sum(axis=0))
    assert not scores.worth[0].any()


def test_rows_of_one_pass_count_alike() -> None:
    scores = ExpertScores(1, 4, 1)
    scores.used(0, [(0, 48), (1, 16)], 64)
    recent = 1.0 - RECENT_DECAY**64
    expected = [(1.0 - DECAY) * count + recent * count / 64 for count in (48, 16, 0, 0)]
    assert scores.worth[0] == pytest.approx(expected)
    scores.used(0, [(2, 1)], 1)
    assert np.argsort(-scores.worth[0]).tolist() == [0, 1, 2, 3]


def test_worth_goes_on_from_kept_counts() -> None:
    scores = ExpertScores(1, 4, 2)
    scores.used(0, [(3, 1)], 1)
    scores.restore(np.array([[5.0, 0.0, 2.0, 1.0]]))
    assert scores.worth[0] == pytest.approx((1.0 - DECAY) * np.array([5.0, 0.0, 2.0, 1.0]))
