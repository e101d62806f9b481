"""The rules that scripts/expert_cache.py compares: what each may know, and what it counts."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from expert_oracles import Belady, Foresight, Known, next_uses, oracles
from expert_rules import Decayed, LastToo, Lru, Trace, hit_rate, possible_rules

PER_LAYER = 6


def trace_of(rows: list[list[list[int]]], warm: int = 0) -> Trace:
    """Of choices within each layer; hits count behind `warm` rows."""
    chosen = np.array(rows)
    firsts = PER_LAYER * np.arange(chosen.shape[1])
    numbers = np.arange(len(chosen))
    return Trace(chosen + firsts[None, :, None], PER_LAYER, numbers >= warm, numbers % 5 == 0)


def random_trace(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    liking = rng.gumbel(size=(2, PER_LAYER))
    noise = rng.gumbel(size=(30, 2, PER_LAYER))
    return trace_of(np.argsort(noise + 1.5 * liking, axis=-1)[..., :2].tolist())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), slots=st.integers(2, 2 * PER_LAYER))
def test_nothing_is_better_than_belady(seed: int, slots: int) -> None:
    trace = random_trace(seed)
    best = hit_rate(trace, slots, Belady(trace))
    for name, new in {**possible_rules(), **oracles()}.items():
        assert hit_rate(trace, slots, new(trace)) <= best, name
    assert hit_rate(trace, slots, Foresight(trace, 30)) == best


@pytest.mark.parametrize("name", sorted(possible_rules()))
def test_a_possible_rule_does_not_see_what_is_to_come(name: str) -> None:
    whole, new = random_trace(3), possible_rules()[name]
    begun = Trace(whole.chosen[:12], PER_LAYER, whole.counted[:12], whole.begins[:12])
    worths = []
    for trace in (whole, begun):
        rule = new(trace)
        for row, layers in enumerate(begun.chosen):
            for index, chosen in enumerate(layers):
                rule.visit(row, slice(index * PER_LAYER, (index + 1) * PER_LAYER), chosen)
        worths.append(rule.worth)
    assert np.array_equal(*worths)
    assert len(set(worths[0].tolist())) > 2


def test_hits_are_counted_where_they_are_to_be() -> None:
    trace = trace_of([[[0]], [[1]], [[0]], [[1]], [[2]], [[0]]], warm=1)
    assert [times.tolist()[0] for times in next_uses(trace)][:4] == [
        2,
        3,
        5,
        next_uses(trace)[5][0],
    ]
    assert hit_rate(trace, 1, Lru(trace)) == 0.0
    assert hit_rate(trace, 2, Lru(trace)) == pytest.approx(2 / 5)
    assert hit_rate(trace, 2, Belady(trace)) == pytest.approx(3 / 5)
    assert hit_rate(trace, 3, Lru(trace)) == pytest.approx(3 / 5)


def test_what_rules_keep() -> None:
    trace = trace_of([[[0]], [[0]], [[1]], [[2]]])
    slow, last = Decayed(trace, 0.9), LastToo(Decayed(trace, 0.9))
    for rule in (slow, last):
        for row, ((chosen,),) in enumerate(zip(trace.chosen, strict=True)):
            rule.visit(row, slice(0, PER_LAYER), chosen)
    assert np.argsort(-slow.worth)[:3].tolist() == [0, 2, 1]
    assert np.argsort(-last.worth)[:3].tolist() == [2, 0, 1]
    assert Known(trace).worth.tolist() == [0.5, 0.25, 0.25, 0, 0, 0]


def test_random_order_keeps_the_rows() -> None:
    trace = random_trace(1)
    warm = Trace(trace.chosen, PER_LAYER, np.arange(30) >= 10, trace.begins)
    other = warm.shuffled(0)
    assert not np.array_equal(warm.chosen[10:], other.chosen)
    assert sorted(other.chosen.tolist()) == sorted(warm.chosen[10:].tolist())
    assert other.counted.tolist() == [False] * 5 + [True] * 15
