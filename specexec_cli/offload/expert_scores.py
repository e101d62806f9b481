"""Scores experts by how often rows are routed to them. Knows neither bytes nor torch.

An expert's worth is the sum of two shares of the rows that were routed to it. In the first share a
row counts DECAY times as much as the next row; in the second it counts RECENT_DECAY times as much,
so that old rows are soon forgotten. docs/tried.md, "Mixtures", has the rules that were worse.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DECAY = 0.995  # what is left of a count after one more row
RECENT_DECAY = 0.9  # what is left of the second share after one more row
_PRIOR_ROWS = 4.0  # likely() adds this many rows with an even use of all experts
_MOST_ROWS = 1.0 / (1.0 - DECAY)  # the count of an expert that every row is routed to


class ExpertScores:
    """How often rows were routed to each of a model's experts, by layer and expert."""

    def __init__(self, layers: int, experts: int, chosen: int) -> None:
        """Begins with nothing known.

        Args:
            experts: number of experts in the layer that has the most.
            chosen: experts that one row is routed to.
        """
        self.counts: Floats = np.zeros((layers, experts))
        self.worth: Floats = np.zeros((layers, experts))
        self._recent: Floats = np.zeros((layers, experts))
        self._rows: Floats = np.zeros(layers)  # rows counted; they decay as the counts do
        self._chosen = chosen

    def used(self, layer: int, rows_by_expert: Sequence[tuple[int, int]], rows: int) -> None:
        """Counts one visit of a layer.

        Args:
            rows_by_expert: the experts asked for, each with the rows that are routed to it.
            rows: all rows of the visit.
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
        """(layers, experts): the probability that `rows` rows ask for each expert."""
        experts = self.counts.shape[1]
        even = _PRIOR_ROWS * self._chosen / experts
        shares = (self.counts + even) / (self._rows[:, None] + _PRIOR_ROWS)
        likely: Floats = 1.0 - (1.0 - np.minimum(shares, 1.0)) ** rows
        return likely

    def restore(self, counts: Floats) -> None:
        """Goes on from the counts of an earlier session.

        Raises:
            ValueError: the counts have another model's shape, or are negative or not finite.
        """
        if counts.shape != self.counts.shape or not np.isfinite(counts).all() or counts.min() < 0:
            raise ValueError("these are not counts of this model's experts")
        self.counts = np.minimum(counts, _MOST_ROWS)
        self._rows = self.counts.sum(axis=1) / self._chosen
        self._recent[:] = 0.0
        self.worth = self.counts / _MOST_ROWS
