"""Rules by which a cache of experts keeps some and gives up others, and how many hits each makes.

Everything is counted in rows: one row at a time visits all layers in turn, as in decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specexec_cli.offload.expert_scores import DECAY, RECENT_DECAY

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """What the rows of some texts chose, in the order in which they were computed."""

    chosen: Ints  # (rows, layers, chosen): numbers of experts, of all layers
    per_layer: int  # experts of a layer
    counted: NDArray[np.bool_]  # (rows,), whose hits count
    begins: NDArray[np.bool_]  # (rows,), which are the first of a text

    @property
    def experts(self) -> int:
        """Of all layers."""
        return self.per_layer * self.chosen.shape[1]

    def shares(self) -> Floats:
        """How often a row that counts chose each expert."""
        rows = self.chosen[self.counted]
        return np.bincount(rows.ravel(), minlength=self.experts) / len(rows)

    def shuffled(self, seed: int) -> Trace:
        """The rows that count in another order: what was chosen before says nothing any more."""
        rows = np.random.default_rng(seed).permutation(self.chosen[self.counted])
        places = np.arange(len(rows))
        return Trace(rows, self.per_layer, places >= len(rows) // 4, places == 0)


class Rule:
    """What every expert is worth keeping, after each visit of a layer."""

    def __init__(self, trace: Trace) -> None:
        """For a trace, of which a rule that is possible uses only the sizes and `begins`."""
        self.trace = trace
        self.worth: Floats = np.zeros(trace.experts)

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        """A row chose these experts of a layer."""


class Lru(Rule):
    """The row of the last use."""

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        self.worth[chosen] = row


class Decayed(Rule):
    """Counts that decay from row to row, as a weighted sum of several rates of decay.

    Each is divided by what it comes to in the long run, so that weights compare shares.
    """

    def __init__(self, trace: Trace, *rates: float, weights: Sequence[float] = ()) -> None:
        super().__init__(trace)
        self._rates, self._weights = rates, weights or (1.0,) * len(rates)
        self._counts = np.zeros((len(rates), trace.experts))

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        worth = 0.0
        for counts, rate, weight in zip(self._counts, self._rates, self._weights, strict=True):
            counts[layer] *= rate
            counts[chosen] += max(1.0 - rate, 1e-9)
            worth = worth + weight * counts[layer]
        self.worth[layer] = worth


class TextAndKept(Rule):
    """Shares of the text so far, beside those of all texts before as so many rows of its own."""

    def __init__(self, trace: Trace, rows: float) -> None:
        super().__init__(trace)
        self._rows = rows
        self._kept = np.zeros(trace.experts)
        self._text = np.zeros(trace.experts)
        self._kept_rows = 0

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        if self.trace.begins[row] and layer.start == 0:
            self._kept += self._text
            self._text[:] = 0.0
            self._kept_rows = row
        self._text[chosen] += 1.0
        kept = self._kept[layer] / max(self._kept_rows, 1)
        self.worth[layer] = self._text[layer] + self._rows * kept


class LastToo(Rule):
    """As another rule, but what the last row used is kept before everything else."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule.trace)
        self._rule = rule

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        self._rule.visit(row, layer, chosen)
        self.worth[layer] = self._rule.worth[layer]
        self.worth[chosen] += 1e6


class Hazard(Rule):
    """How often experts of this age and count were used by the next row, learned on the way.

    Ages and counts are told apart by powers of two, so that a few rows teach something.
    """

    _AGES, _COUNTS = 12, 12

    def __init__(self, trace: Trace, rate: float) -> None:
        super().__init__(trace)
        self._rate = rate
        self._counts = np.zeros(trace.experts)
        self._last = np.full(trace.experts, -(1 << self._AGES))
        self._bucket = np.zeros(trace.experts, dtype=np.int64)
        even = trace.chosen.shape[2] / trace.per_layer
        self._seen = np.full(self._AGES * self._COUNTS, 1.0)
        self._used = np.full(self._AGES * self._COUNTS, even)

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        np.add.at(self._seen, self._bucket[layer], 1.0)
        np.add.at(self._used, self._bucket[chosen], 1.0)
        self._counts[layer] *= self._rate
        self._counts[chosen] += 1.0
        self._last[chosen] = row
        age = np.log2(row - self._last[layer] + 1.0)
        count = 2.0 + np.log2(np.maximum(self._counts[layer], 0.25))
        self._bucket[layer] = np.clip(age, 0, self._AGES - 1).astype(int) * self._COUNTS
        self._bucket[layer] += np.clip(count, 0, self._COUNTS - 1).astype(int)
        # within a bucket the count decides
        hazard = self._used / self._seen
        self.worth[layer] = hazard[self._bucket[layer]] + 1e-6 * self._counts[layer]


class Fitted(Rule):
    """Shares of several rates of decay, weighted as they would best have foretold the next row.

    By least squares over all experts of the rows so far.
    """

    def __init__(self, trace: Trace, *rates: float) -> None:
        super().__init__(trace)
        self._rates = np.array(rates)[:, None]
        self._shares = np.zeros((len(rates), trace.experts))
        self._products = 1e-3 * np.eye(len(rates))
        self._sums = np.full(len(rates), 1e-3 / len(rates))

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        shares = self._shares[:, layer]
        self._products += shares @ shares.T
        self._sums += self._shares[:, chosen].sum(axis=1)
        shares *= self._rates
        self._shares[:, chosen] += 1.0 - self._rates
        self.worth[layer] = np.linalg.solve(self._products, self._sums) @ shares


class Leader(Rule):
    """Follows the rate of decay whose worthiest experts were used most often so far.

    Args:
        share: of a layer's experts that count as the worthiest.
    """

    def __init__(self, trace: Trace, share: float, *rates: float) -> None:
        super().__init__(trace)
        self._rates = np.array(rates)[:, None]
        self._shares = np.zeros((len(rates), trace.experts))
        self._hits = np.zeros(len(rates))
        self._most = max(1, round(share * trace.per_layer))

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        shares = self._shares[:, layer]
        least = np.partition(shares, -self._most, axis=1)[:, -self._most, None]
        self._hits += (self._shares[:, chosen] >= least).sum(axis=1)
        shares *= self._rates
        self._shares[:, chosen] += 1.0 - self._rates
        self.worth[layer] = shares[int(np.argmax(self._hits))]


class Successors(Rule):
    """How often each expert followed those that the last row chose, learned on the way.

    Args:
        share: of that in the worth; the rest is the share in all rows so far, decayed.
    """

    def __init__(self, trace: Trace, share: float, rate: float) -> None:
        super().__init__(trace)
        self._share, self._slow = share, Decayed(trace, rate)
        layers, size = trace.chosen.shape[1], trace.per_layer
        self._followed = np.zeros((layers, size, size))
        self._uses = np.full((layers, size), 4.0)
        self._before: dict[int, Ints] = {}

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        self._slow.visit(row, layer, chosen)
        index, own = layer.start // self.trace.per_layer, chosen - layer.start
        followed, uses = self._followed[index], self._uses[index]
        if not self.trace.begins[row] and index in self._before:
            before = self._before[index]
            followed[np.ix_(before, own)] += 1.0
            uses[before] += 1.0
        self._before[index] = own
        slow = self._slow.worth[layer]
        next_row = ((followed[own] + 4.0 * slow) / uses[own, None]).mean(axis=0)
        self.worth[layer] = self._share * next_row + (1.0 - self._share) * slow


def hit_rate(trace: Trace, slots: int, rule: Rule) -> float:
    """The share of the choices that count which are in a cache of so many slots.

    What a visit chose is in the cache behind it, where it fits; of the rest the worthiest stay.
    """
    held = np.zeros(trace.experts, dtype=np.bool_)
    hits = asked = 0
    for row, layers in enumerate(trace.chosen):
        for index, chosen in enumerate(layers):
            if trace.counted[row]:
                asked += len(chosen)
                hits += int(held[chosen].sum())
            first = index * trace.per_layer
            rule.visit(row, slice(first, first + trace.per_layer), chosen)
            held[chosen] = True
            over = int(held.sum()) - slots
            if over > 0:
                held[chosen] = False
                others = np.flatnonzero(held)
                held[others[np.argsort(rule.worth[others], kind="stable")[:over]]] = False
                held[chosen] = True
    return hits / asked


Rules = dict[str, Callable[[Trace], Rule]]


def kept_rule(trace: Trace) -> Rule:
    """That of specexec_cli.offload.expert_scores."""
    return Decayed(trace, RECENT_DECAY, DECAY)


def possible_rules() -> Rules:
    """By name, those that a cache can follow."""
    found: Rules = {"lru": Lru}
    for rate in (0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0):
        found[f"decay {rate}"] = lambda trace, rate=rate: Decayed(trace, rate)
    found["0.9 and 0.995 (kept)"] = kept_rule
    for fast, slow, weight in ((0.5, 0.98, 0.2), (0.8, 0.99, 0.3)):
        found[f"{weight} of decay {fast}, rest {slow}"] = lambda trace, f=fast, s=slow, w=weight: (
            Decayed(trace, f, s, weights=(w, 1.0 - w))
        )
    for rows in (10.0, 40.0):
        found[f"text + kept as {rows:.0f} rows"] = lambda trace, rows=rows: TextAndKept(trace, rows)
    found["decay 0.995, last row's kept"] = lambda trace: LastToo(Decayed(trace, 0.995))
    found["decay 0.98, last row's kept"] = lambda trace: LastToo(Decayed(trace, 0.98))
    for rate in (0.95, 0.995):
        found[f"hazard by age and decay {rate}"] = lambda trace, rate=rate: Hazard(trace, rate)
    rates = (0.8, 0.9, 0.95, 0.98, 0.995)
    found["fitted sum of decays"] = lambda trace: Fitted(trace, *rates)
    found["best decay so far"] = lambda trace: Leader(trace, 0.25, *rates)
    for share in (0.3, 0.6):
        found[f"successors {share}"] = lambda trace, share=share: Successors(trace, share, 0.98)
    return found
