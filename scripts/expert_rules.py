"""Rules by which a cache of experts decides what to keep, and the hit rate of each.

Time is counted in rows: one row after another visits all layers in turn, as in plain decoding.
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
    """The experts that the rows of some texts chose, in the order of computation."""

    chosen: Ints  # (rows, layers, chosen): numbers of experts, counted over all layers
    per_layer: int  # experts of a layer
    counted: NDArray[np.bool_]  # (rows,) whether a row's hits count
    begins: NDArray[np.bool_]  # (rows,) whether a row is the first of a text

    @property
    def experts(self) -> int:
        """The number of experts of all layers together."""
        return self.per_layer * self.chosen.shape[1]

    def shares(self) -> Floats:
        """How often the counted rows chose each expert, as shares."""
        rows = self.chosen[self.counted]
        return np.bincount(rows.ravel(), minlength=self.experts) / len(rows)

    def shuffled(self, seed: int) -> Trace:
        """The counted rows in random order, so that earlier choices predict nothing."""
        rows = np.random.default_rng(seed).permutation(self.chosen[self.counted])
        places = np.arange(len(rows))
        return Trace(rows, self.per_layer, places >= len(rows) // 4, places == 0)


class Rule:
    """Values every expert after each visit of a layer; the cache keeps the most valuable."""

    def __init__(self, trace: Trace) -> None:
        """Begins a trace; a rule that a cache can follow uses only its sizes and `begins`."""
        self.trace = trace
        self.worth: Floats = np.zeros(trace.experts)

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        """Takes note of a row's choice among a layer's experts."""


class Lru(Rule):
    """Least recently used: values an expert by the row of its last use."""

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        self.worth[chosen] = row


class Decayed(Rule):
    """Values an expert by decayed counts of its uses, a weighted sum over several rates of decay.

    Each count is divided by its limit for an expert that every row uses, so that weights compare
    shares.
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
    """Values an expert by its share in this text so far, where all earlier texts count as a fixed
    number of rows."""

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
    """Another rule, but with the last row's experts kept before all others."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule.trace)
        self._rule = rule

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        self._rule.visit(row, layer, chosen)
        self.worth[layer] = self._rule.worth[layer]
        self.worth[chosen] += 1e6


class Hazard(Rule):
    """Values an expert by how often experts of its age and count were used by the next row.

    That is learned from the rows so far. Ages and counts are put into classes by powers of two, so
    that few rows are enough.
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
        # within a class the count decides
        hazard = self._used / self._seen
        self.worth[layer] = hazard[self._bucket[layer]] + 1e-6 * self._counts[layer]


class Fitted(Rule):
    """Values an expert by decayed shares, weighted as they would have predicted the next row best.

    The weights are fitted by least squares over all experts of the rows so far.
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
    """Follows the rate of decay with the best hits so far.

    Args:
        share: share of a layer's experts that counts as kept when the hits are compared.
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
    """Values an expert by how often it followed the experts that the last row chose.

    That is learned from the rows so far.

    Args:
        share: weight of that in the value; the rest is the expert's decayed share of all rows.
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
    """The share of the counted choices that a cache with `slots` slots holds.

    After each visit the cache holds the experts that the visit chose, as far as they fit, and the
    most valuable of the others.
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
    """The rule that specexec_cli.offload.expert_scores uses."""
    return Decayed(trace, RECENT_DECAY, DECAY)


def possible_rules() -> Rules:
    """The rules that a real cache could follow, by name."""
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
