"""How often a drafted token is really accepted, learned while decoding. Arithmetic, torch-free.

Every position that the target settles labels the children that the draft model had proposed there:
one of them was the target's token, or none. A logistic regression on what is known before the
target is asked corrects the draft's own probability p of a child:

    logit P(accepted) = w0 + w1 logit(p) + w2 log(1 + rank) + w3 log(depth) + w4 entropy

It starts as the identity and follows the stream of labels by Newton steps with forgetting, an
extended Kalman filter for a fixed state, so five weights and a 5 x 5 matrix are all that is kept.
Each position is predicted before it is learned from. While these predictions are worse than the
draft's own, by log loss over the last few hundred positions, the draft's own are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specexec_cli.drafting.search import Floats, Ints
from specexec_cli.kept import numbers

CHILDREN = 16  # of a settled position that are learned from, the most probable ones

_ENTROPY_OF = 8  # most probable children; the others count as one
_IDENTITY = np.array([0.0, 1.0, 0.0, 0.0, 0.0])
_LOWEST = np.array([-2.0, 0.3, -2.0, -2.0, -2.0])
_HIGHEST = np.array([2.0, 3.0, 2.0, 2.0, 2.0])
_PRIOR = 20.0  # information of the starting weights
_MEMORY = 0.998  # the last five hundred positions decide
_JUDGED = 0.995  # and the last two hundred say whether that is right
_BINS = 10
_MOST = 1e9  # of information and losses; a file that says more is damaged


class Calibration:
    """From the draft's probabilities of a node's children to those of their acceptance."""

    def __init__(self) -> None:
        self._weights = _IDENTITY.copy()
        self._information = _PRIOR * np.eye(len(_IDENTITY))
        self._losses = np.zeros(2)  # nats: of the draft's own probabilities, of the corrected ones
        self.reliability = Reliability()

    @property
    def trusted(self) -> bool:
        """Whether it has predicted no worse than the draft itself."""
        return bool(self._losses[1] <= self._losses[0])

    def calibrated(self, log_probs: Floats, depths: Floats | Ints) -> Floats:
        """Log-probabilities that children are accepted, given that their parent is.

        Args:
            log_probs: (n, width) the draft's, each row falling; best with at least 8 columns.
            depths: (n,) of the children, from 1.
        Returns:
            (n, width); a row's probabilities sum to 1 at most.
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
            log_probs: (width,) the draft's for the most probable children, falling.
            depth: of the children.
            accepted: which of them was the target's token; None for none of them.
            applied: whether trees are searched by the calibrated probabilities.
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
        """One Newton step from these labels and the prior of all earlier ones."""
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
        """The object whose `state` this was.

        Raises:
            ValueError, KeyError, TypeError: it is not one.
        """
        found, count = cls(), len(_IDENTITY)
        weights = numbers(state["weights"], (count,), _LOWEST.min(), _HIGHEST.max())
        information = numbers(state["information"], (count, count), -_MOST, _MOST)
        # it never falls below that of the starting weights
        least = np.linalg.eigvalsh(information).min()
        if not np.allclose(information, information.T) or least < 0.99 * _PRIOR:
            raise ValueError("information must be symmetric, and no less than at the start")
        found._weights = np.clip(weights, _LOWEST, _HIGHEST)
        found._information = information
        found._losses = numbers(state["losses"], (2,), 0.0, _MOST)
        return found


class Reliability:
    """How far predicted probabilities are from the frequencies that came true."""

    def __init__(self) -> None:
        self._bins = np.zeros((2, _BINS, 3))  # own, used: count, sum predicted, sum true

    def add(self, own: Floats, used: Floats, labels: Floats) -> None:
        """Predictions of children at one position, by the draft itself and as they were used."""
        for bins, chances in zip(self._bins, (own, used), strict=True):
            at = np.minimum((chances * _BINS).astype(int), _BINS - 1)
            np.add.at(bins, at, np.stack([np.ones_like(chances), chances, labels], axis=1))

    @property
    def bins(self) -> list[list[list[float]]]:
        """Per tenth of predicted probability: predictions, their sum, and how many came true.

        First those of the draft model itself, then those that were used. Bins of several
        generations add up.
        """
        return self._bins.tolist()


def calibration_errors(bins: ArrayLike) -> tuple[float, float] | None:
    """Expected calibration error, draft's own and as used; None without predictions.

    Per child that was predicted to be accepted, not per prediction: most children are predicted
    near 0, rightly, and would drown the others. So it is sum |predicted - true| / sum predicted.

    Args:
        bins: (2, 10, 3) of Reliability, or a sum of such. Few predictions look badly calibrated by
            chance alone, so sum first.
    """
    _, predicted, true = np.moveaxis(np.asarray(bins, dtype=np.float64), -1, 0)
    totals = predicted.sum(axis=1)
    if not totals.all():
        return None
    own, used = (np.abs(predicted - true).sum(axis=1) / totals).tolist()
    return own, used


def _features(log_probs: Floats, depths: Floats | Ints) -> Floats:
    """The five numbers that the calibration reads of each child, (n, width, 5)."""
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
    """Logits of probabilities given by their logarithms, bounded to what can be learned."""
    bounded = np.clip(log_probs, -50.0, -1e-4)
    return bounded - np.log(-np.expm1(bounded))


def _sigmoid(logits: Floats) -> Floats:
    return np.exp(-np.logaddexp(0.0, -logits))


def _log_loss(logits: Floats, labels: Floats) -> float:
    return float((np.logaddexp(0.0, logits) - labels * logits).sum())
