"""Calibrated acceptance: what it learns, when it is not used, and how wrong it says it is."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specexec_cli.drafting.calibration import Calibration, Reliability
from specexec_cli.lab.bench.summary import calibration_errors

WIDTH = 8


def position(rng: np.random.Generator) -> np.ndarray:
    """A draft's log-probabilities of its best children, falling."""
    probs = rng.dirichlet(np.full(WIDTH + 4, 0.4))
    return np.log(np.sort(probs)[::-1][:WIDTH])


def taught(power: float, positions: int = 600, seed: int = 0) -> Calibration:
    """By a target that draws from the draft's distribution to the power of `power`."""
    rng, calibration = np.random.default_rng(seed), Calibration()
    for _ in range(positions):
        log_probs = position(rng)
        true = np.exp(power * log_probs)
        true = np.append(true, max(0.0, 1.0 - np.exp(log_probs).sum()) ** power)
        drawn = int(rng.choice(WIDTH + 1, p=true / true.sum()))
        calibration.observe(log_probs, int(rng.integers(1, 9)), drawn if drawn < WIDTH else None)
    return calibration


def test_it_starts_as_the_draft_s_own_probabilities() -> None:
    log_probs = np.stack([position(np.random.default_rng(seed)) for seed in range(20)])
    depths = np.arange(1, 21)
    np.testing.assert_allclose(Calibration().calibrated(log_probs, depths), log_probs, atol=2e-4)


@pytest.mark.parametrize("power", [0.4, 2.5])
def test_it_corrects_a_draft_that_is_too_sure_or_not_sure_enough(power: float) -> None:
    calibration = taught(power)
    assert calibration.trusted
    own, used = calibration_errors(calibration.reliability.bins) or (0.0, 0.0)
    assert own > 0.1
    assert used < own / 2  # from the first position on, what it learns from included


def test_it_leaves_a_right_draft_alone() -> None:
    rng = np.random.default_rng(5)
    log_probs = np.stack([position(rng) for _ in range(50)])
    found = np.exp(taught(1.0).calibrated(log_probs, np.full(50, 2)))
    assert abs(found - np.exp(log_probs)).mean() < 0.02


def test_probabilities_of_siblings_sum_to_one_at_most() -> None:
    rng, calibration = np.random.default_rng(1), taught(2.5)
    found = np.exp(
        calibration.calibrated(np.stack([position(rng) for _ in range(99)]), np.ones(99))
    )
    assert found.sum(axis=1).max() <= 1.0 + 1e-9
    assert (found >= 0.0).all()


def test_excluded_tokens_stay_excluded() -> None:
    log_probs = np.array([[np.log(0.9), -np.inf, -np.inf]])
    found = taught(0.4).calibrated(log_probs, np.ones(1))
    assert np.isfinite(found[0]).tolist() == [True, False, False]


def test_after_a_drift_it_is_not_used_until_it_is_right_again() -> None:
    # no merit to lose first
    calibration = Calibration.restored({**taught(2.5).state(), "losses": [0.0, 0.0]})
    rng = np.random.default_rng(2)
    distrusted = 0
    for _ in range(600):  # now the draft is wrong nearly always
        log_probs = position(rng)
        calibration.observe(log_probs, 1, None if rng.random() < 0.9 else 0)
        distrusted += not calibration.trusted
        if not calibration.trusted:
            row = position(rng)[None]
            np.testing.assert_array_equal(calibration.calibrated(row, np.ones(1)), row)
    assert distrusted > 0
    assert calibration.trusted


@pytest.mark.parametrize("accepted", [0, None], ids=["always right", "never right"])
def test_it_stays_bounded(accepted: int | None) -> None:
    calibration, rng = Calibration(), np.random.default_rng(3)
    for _ in range(3000):
        calibration.observe(position(rng), 1, accepted)
    learned = calibration.state()
    assert np.isfinite(learned["weights"]).all()
    assert np.abs(learned["weights"]).max() <= 3.0
    assert np.linalg.cond(learned["information"]) < 1e8


def test_what_is_kept_comes_back() -> None:
    calibration = taught(2.5)
    again = Calibration.restored(json.loads(json.dumps(calibration.state())))
    row = position(np.random.default_rng(4))[None]
    np.testing.assert_array_equal(
        again.calibrated(row, np.ones(1)), calibration.calibrated(row, np.ones(1))
    )


@pytest.mark.parametrize(
    "damage",
    [
        {"weights": [0.0]},
        {"weights": [float("nan")] * 5},
        {"information": np.zeros((5, 5)).tolist()},
        {"losses": "none"},
    ],
)
def test_what_is_damaged_does_not(damage: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"not a list of|not a number from|symmetric"):
        Calibration.restored({**Calibration().state(), **damage})


def test_calibration_errors_are_gaps_between_bins() -> None:
    reliability = Reliability()
    assert calibration_errors(reliability.bins) is None
    right, sure = np.array([0.5, 0.5]), np.array([0.9, 0.9])
    reliability.add(sure, right, np.array([1.0, 0.0]))
    assert calibration_errors(reliability.bins) == pytest.approx((0.8 / 1.8, 0.0))
    twice = 2.0 * np.array(reliability.bins)
    assert calibration_errors(twice) == calibration_errors(reliability.bins)
