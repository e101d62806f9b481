"""Rules for a cache of experts that use knowledge of the future, as bounds; see expert_rules.py."""

from __future__ import annotations

import numpy as np
from expert_rules import Ints, Rule, Rules, Trace

NEVER = np.iinfo(np.int64).max // 2


class Known(Rule):
    """Knows how often each expert is used in the whole trace, but not in which order.

    If rows are independent draws, no rule without knowledge of the future is better.
    Source: Aho, Denning, Ullman, Principles of optimal page replacement, JACM 18, 1971, section 4.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.worth = trace.shares()


class Foresight(Rule):
    """Knows the choices of the next rows, and how often experts are used in the whole trace.

    It bounds every rule that predicts as many rows.
    """

    def __init__(self, trace: Trace, rows: int) -> None:
        super().__init__(trace)
        self._rows, self._shares = rows, trace.shares()
        self._next = next_uses(trace)
        self._upcoming = np.full(trace.experts, NEVER)

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        layers = self.trace.chosen.shape[1]
        time = row * layers + layer.start // self.trace.per_layer
        self._upcoming[chosen] = self._next[time]
        away = self._upcoming - time
        # layers of the last of these rows are seen as far as this layer
        self.worth = np.where(away <= self._rows * layers, 1e6 - away, self._shares)


class Belady(Rule):
    """Belady's optimum: values an expert by minus the time of its next use."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._next = next_uses(trace)

    def visit(self, row: int, layer: slice, chosen: Ints) -> None:
        layers = self.trace.chosen.shape[1]
        self.worth[chosen] = -self._next[row * layers + layer.start // self.trace.per_layer]


def next_uses(trace: Trace) -> list[Ints]:
    """For each visit of a layer, the next use of each chosen expert, counted in visits."""
    upcoming = np.full(trace.experts, NEVER)
    found = []
    visits = trace.chosen.reshape(-1, trace.chosen.shape[2])
    for time in range(len(visits) - 1, -1, -1):
        found.append(upcoming[visits[time]])
        upcoming[visits[time]] = time
    return found[::-1]


def oracles() -> Rules:
    """The rules of this module by name."""
    found: Rules = {"knows the shares": Known}
    for rows in (1, 2, 4, 8, 16):
        found[f"sees {rows} rows ahead"] = lambda trace, rows=rows: Foresight(trace, rows)
    found["belady"] = Belady
    return found
