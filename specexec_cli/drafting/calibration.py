"""Learns while decoding how often a drafted token is accepted. Imports no torch.

Every position that the target settles labels the children that the draft model proposed there: one
of them was the target's token, or none. A logistic regression corrects the draft's own probability
of a child from what is known before the target's pass:

    logit P(accepted) = w0 + w1 logit(draft_prob) + w2 log(1 + rank) + w3 log(depth) + w4 entropy

It starts as the identity and follows the labels by Newton steps with forgetting, which is an
extended Kalman filter for a constant state. So five weights and a 5 x 5 matrix are all that is
kept. Each position is predicted before it is learned from. While these predictions are worse than
the draft's own, by log loss over the last few hundred positions, the draft's own are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specexec_cli.drafting.search import Floats, Ints
from specexec_cli.kept import numbers

CHILDREN = 16  # the most probable children of a settled position; the others are not learned from

_ENTROPY_OF = 8  # the most probable children count by themselves in the entropy, others as one
_IDENTITY = np.array([0.0, 1.0, 0.0, 0.0, 0.0])  # the weights that change no probability
_LOWEST = np.array([-2.0, 0.3, -2.0, -2.0, -2.0])  # bounds of the weights
_HIGHEST = np.array([2.0, 3.0, 2.0, 2.0, 2.0])
_PRIOR = 20.0  # information of the starting weights
_MEMORY = 0.998  # decay per position of what the weights learned from: about 500 positions count
_JUDGED = 0.995  # decay per position of the log losses that are compared: about 200 count
_BINS = 10
_MOST = 1e9  # bound of information and losses; a file with larger numbers is damaged


class Calibration:
    """Turns the draft's probabilities of a node's children into probabilities of acceptance."""

    def __init__(self) -> None:
        self._weights = _IDENTITY.copy()
        self._information = _PRIOR * np.eye(len(_IDENTITY))
        self._losses = np.zeros(2)  # nats: of the draft's own probabilities, of the corrected ones
        self.reliability = Reliability()

    @property
    def trusted(self) -> bool:
        """Whether its recent predictions were no worse than the draft's own."""
        return bool(self._losses[1] <= self._losses[0])

    def calibrated(self, log_probs: Floats, depths: Floats | Ints) -> Floats:
        """Log-probabilities that children are accepted, given that their parent is.

        Args:
            log_probs: (n, width) the draft's log-probabilities of the children of n nodes, each row
                falling; at least 8 columns give the entropy that was learned with.
            depths: (n,) depths of the children, from 1.
        Returns:
            (n, width); the probabilities of a row sum to 1 at most.
        """
        if not self.trusted:
            return log_probs
        found = -np.logaddexp(0.0, -self._logits(_features(log_probs, depths)))
        found = np.where(np.isfinite(log_probs), found, -np.inf)
        excess = np.log(np.maximum(np.exp(found).sum(axis=1, keepdims=True), 1.0))
        return np.asarray(found - excess, dtype=np.float64)

    def observe(
        self, log_probs: Floats, depth: int, accepted: int | None, applied: bool = True
    ) -> None:
        """Learns from a settled position.

        Args:
            log_probs: (width,) the draft's log-probabilities of the best children, falling.
            depth: depth of the children, from 1.
            accepted: index of the child that was the target's token; None if none was.
            applied: whether trees are searched by calibrated probabilities.
        """
        depths = np.array([float(depth)])
        features = _features(log_probs[None], depths)[0]
        known = np.isfinite(log_probs)
        labels = np.zeros(len(log_probs))
        if accepted is not None:
            labels[accepted] = 1.0
        logits = self._logits(features)
        own = _logit(log_probs)
        losses = [_log_loss(each[known], labels[known]) for each in (own, logits)]
        self._losses = _JUDGED * self._losses + losses
        used = self.calibrated(log_probs[None], depths)[0] if applied else log_probs
        self.reliability.add(np.exp(log_probs[known]), np.exp(used[known]), labels[known])
        self._learn(features[known], labels[known], logits[known])

    def _logits(self, features: Floats) -> Floats:
        return np.asarray(features @ self._weights, dtype=np.float64)

    def _learn(self, features: Floats, labels: Floats, logits: Floats) -> None:
        """Takes one Newton step with these labels; earlier ones are in the information matrix."""
        chances = _sigmoid(logits)
        self._information *= _MEMORY
        self._information += (1.0 - _MEMORY) * _PRIOR * np.eye(len(_IDENTITY))
        self._information += (features.T * (chances * (1.0 - chances))) @ features
        step = np.linalg.solve(self._information, features.T @ (labels - chances))
        self._weights = np.clip(self._weights + step, _LOWEST, _HIGHEST)

    def state(self) -> dict[str, Any]:
        """What was learned, for JSON."""
        return {
            "weights": self._weights.tolist(),
            "information": self._information.tolist(),
            "losses": self._losses.tolist(),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Calibration:
        """The calibration that `state` described.

        Raises:
            ValueError, KeyError, TypeError: this is no valid state.
        """
        found, count = cls(), len(_IDENTITY)
        weights = numbers(state["weights"], (count,), _LOWEST.min(), _HIGHEST.max())
        information = numbers(state["information"], (count, count), -_MOST, _MOST)
        # the information never falls below that of the starting weights
        least = np.linalg.eigvalsh(information).min()
        if not np.allclose(information, information.T) or least < 0.99 * _PRIOR:
            raise ValueError("information must be symmetric, and no less than at the start")
        found._weights = np.clip(weights, _LOWEST, _HIGHEST)
        found._information = information
        found._losses = numbers(state["losses"], (2,), 0.0, _MOST)
        return found


class Reliability:
    """Compares predicted probabilities with how often they came true."""

    def __init__(self) -> None:
        # of the draft's own predictions and of those used: count, sum predicted, sum true
        self._bins = np.zeros((2, _BINS, 3))

    def add(self, own: Floats, used: Floats, labels: Floats) -> None:
        """Adds the predictions for the children at one position.

        Args:
            own: (n,) the draft's own probabilities.
            used: (n,) the probabilities that the search used.
            labels: (n,) 1 for the child that was accepted, 0 for the others.
        """
        for bins, chances in zip(self._bins, (own, used), strict=True):
            at = np.minimum((chances * _BINS).astype(int), _BINS - 1)
            np.add.at(bins, at, np.stack([np.ones_like(chances), chances, labels], axis=1))

    @property
    def bins(self) -> list[list[list[float]]]:
        """(2, 10, 3): the draft's own predictions, then those used; tenths of predicted
        probability; number of predictions, their sum, and how many came true.

        Bins of several generations may be added.
        """
        return self._bins.tolist()


def _features(log_probs: Floats, depths: Floats | Ints) -> Floats:
    """The five features of each child, (n, width, 5), in the order of the weights."""
    chances = np.exp(log_probs[:, :_ENTROPY_OF])
    rest = np.clip(1.0 - chances.sum(axis=1, keepdims=True), 0.0, 1.0)
    parts = np.concatenate([chances, rest], axis=1)
    entropy = -(parts * np.log(np.maximum(parts, 1e-12))).sum(axis=1)
    shape = log_probs.shape
    return np.stack(
        [
            np.ones(shape),
            _logit(log_probs),
            np.broadcast_to(np.log1p(np.arange(shape[1])), shape),
            np.broadcast_to(np.log(depths)[:, None], shape),
            np.broadcast_to(entropy[:, None], shape),
        ],
        axis=-1,
    )


def _logit(log_probs: Floats) -> Floats:
    """Logits of probabilities given by their logarithms, bounded away from 0 and 1."""
    bounded = np.clip(log_probs, -50.0, -1e-4)
    return bounded - np.log(-np.expm1(bounded))


def _sigmoid(logits: Floats) -> Floats:
    return np.exp(-np.logaddexp(0.0, -logits))


def _log_loss(logits: Floats, labels: Floats) -> float:
    return float((np.logaddexp(0.0, logits) - labels * logits).sum())
