"""Which experts are worth keeping: shares of what routing asked for. Knows no bytes, no torch.

An expert's worth is how large a share of the rows were routed to it, where each row counts a little
less than the next one, plus the same share with rows that are forgotten soon. docs/tried.md,
"Mixtures", has the rules that were worse.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DECAY = 0.995  # of a count, from one row to the next
RECENT_DECAY = 0.9  # of the share that is forgotten soon
_PRIOR_ROWS = 4.0  # rows that an even use of all experts counts as
_MOST_ROWS = 1.0 / (1.0 - DECAY)  # that one expert's count comes to in the long run


class ExpertScores:
    """Counts of a model's experts, by layer and expert."""

    def __init__(self, layers: int, experts: int, chosen: int) -> None:
        """Begins with nothing known.

        Args:
            experts: of the layer that has the most.
            chosen: experts that one row is routed to.
        """
        self.counts: Floats = np.zeros((layers, experts))
        self.worth: Floats = np.zeros((layers, experts))
        self._recent: Floats = np.zeros((layers, experts))
        self._rows: Floats = np.zeros(layers)  # whose choices the counts are
        self._chosen = chosen

    def used(self, layer: int, rows_by_expert: Sequence[tuple[int, int]], rows: int) -> None:
        """One visit of a layer.

        Args:
            rows_by_expert: the experts asked for, each with the rows that are routed to it.
            rows: of the visit.
        """
        decay, left = DECAY**rows, RECENT_DECAY**rows
        self.counts[layer] *= decay
        self._recent[layer] *= left
        self._rows[layer] = self._rows[layer] * decay + rows
        for expert, count in rows_by_expert:
            self.counts[layer, expert] += count
            self._recent[layer, expert] += (1.0 - left) * count / rows
        self.worth[layer] = self.counts[layer] / _MOST_ROWS + self._recent[layer]

    def likely(self, rows: int) -> Floats:
        """How likely each expert is to be asked for by so many rows, (layers, experts)."""
        experts = self.counts.shape[1]
        even = _PRIOR_ROWS * self._chosen / experts
        shares = (self.counts + even) / (self._rows[:, None] + _PRIOR_ROWS)
        likely: Floats = 1.0 - (1.0 - np.minimum(shares, 1.0)) ** rows
        return likely

    def restore(self, counts: Floats) -> None:
        """Goes on from the counts of an earlier session.

        Raises:
            ValueError: they are of another model, or no counts.
        """
        if counts.shape != self.counts.shape or not np.isfinite(counts).all() or counts.min() < 0:
            raise ValueError("these are not counts of this model's experts")
        self.counts = np.minimum(counts, _MOST_ROWS)
        self._rows = self.counts.sum(axis=1) / self._chosen
        self._recent[:] = 0.0
        self.worth = self.counts / _MOST_ROWS
