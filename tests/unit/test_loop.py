"""What an iteration hands from drafter to target and back, and what it reports."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from toys import ToyLM, ToyTarget

from specexec_cli.config import SamplingConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.decoding import autoregressive as autoregressive_module
from specexec_cli.decoding import loop as loop_module
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.decoding.loop import specexec
from specexec_cli.sampling import Sampler
from specexec_cli.verify.accept import Accepted

GREEDY = Sampler(SamplingConfig())
# two children of the root, one of which has a child
TREE = DraftTree(np.array([3, 4, 5]), np.array([-1, -1, 0]), np.array([1, 1, 2]), np.zeros(3))


@dataclass
class Clock:
    """Seconds that pass only where somebody says so."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (loop_module, autoregressive_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


@dataclass
class SlowTarget(ToyTarget):
    """A pass takes four seconds and streams a thousand bytes per row."""

    clock: Clock = field(default_factory=Clock)

    def verify(self, pending: Sequence[int], tree: DraftTree) -> Tensor:
        self.clock.now += 4.0
        self.bytes_streamed += 1000 * (len(pending) + len(tree))
        return super().verify(pending, tree)


@dataclass
class Told:
    """A drafter that always grows TREE, in half a second, and writes down what it is told."""

    clock: Clock
    grown: list[tuple[list[int], int, int]] = field(default_factory=list)
    committed: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    observed: list[StepResult] = field(default_factory=list)

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        self.clock.now += 0.5
        self.grown.append((list(context), max_depth, pending))
        return TREE if max_depth >= 2 else DraftTree.empty()

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        self.committed.append((tuple(nodes), tuple(tokens)))

    def observe(self, step: StepResult) -> None:
        self.observed.append(step)


def everything(
    tree: DraftTree,
    logits: Tensor,
    sampler: Sampler,
    context: Sequence[int],
    limit: int,
    eos_ids: Collection[int],
) -> Accepted:
    """A walk that takes nodes 0 and 2 and a bonus token, or as much of it as there is room for."""
    assert logits.shape == (1 + len(tree), 8)
    assert sampler is GREEDY
    assert torch.equal(logits[0], torch.from_numpy(ToyLM(0).logits(context)))
    if len(tree) == 0:
        return Accepted((), (7,), (False,))
    return Accepted((0, 2)[: limit - 1], (3, 5, 6)[:limit], (True, True, False)[:limit])


def test_the_drafter_is_told_of_text_room_and_rows(clock: Clock) -> None:
    target, drafter = SlowTarget(ToyLM(0), clock=clock), Told(clock)
    target.tokens = [1, 2]  # of an earlier generation
    steps = []
    for step in specexec(target, drafter, GREEDY, (1, 2, 1, 1), 8, (), everything):
        steps.append(step)
        assert drafter.observed == steps, "before anybody sees the step"
    first, second = [1, 2, 1, 1], [1, 2, 1, 1, 3, 5, 6]
    # eight tokens, then five, then two: the last of them is the bonus token
    assert drafter.grown == [
        (first, 7, 2),
        (second, 4, 1),
        ([*second, 3, 5, 6], 1, 1),
        ([*second, 3, 5, 6, 7], 0, 1),
    ]
    assert drafter.committed == [((0, 2), (3, 5, 6))] * 2 + [((), (7,))] * 2
    assert target.tokens == [*second, 3, 5, 6, 7]


def test_an_iteration_reports_what_it_did_and_cost(clock: Clock) -> None:
    target, drafter = SlowTarget(ToyLM(0), clock=clock), Told(clock)
    clock.now, target.bytes_streamed = 50.0, 10**6
    steps = list(specexec(target, drafter, GREEDY, (1, 2), 4, (), everything))
    assert steps == [
        StepResult(
            tokens=(3, 5, 6), drafted=(True, True, False), tree_nodes=3, tree_depth=2, draft_s=0.5,
            verify_s=4.0, bytes_streamed=5000, pending_rows=2,
        ),
        StepResult(
            tokens=(7,), drafted=(False,), tree_nodes=0, tree_depth=0, draft_s=0.5, verify_s=4.0,
            bytes_streamed=1000, pending_rows=1, finish_reason="length",
        ),
    ]  # fmt: skip


def test_a_plain_pass_reports_what_it_did_and_cost(clock: Clock) -> None:
    target = SlowTarget(ToyLM(0), clock=clock, bytes_streamed=10**6)
    steps = list(autoregressive(target, GREEDY, (1, 2, 3), 2, ()))
    assert [
        (step.verify_s, step.draft_s, step.bytes_streamed, step.pending_rows, step.finish_reason)
        for step in steps
    ] == [(4.0, 0.0, 3000, 3, None), (4.0, 0.0, 1000, 1, "length")]
    assert all((step.tree_nodes, step.tree_depth, step.drafted) == (0, 0, (False,))
               for step in steps)  # fmt: skip


@pytest.mark.parametrize("eos_ids", [(), {6}, {5, 6}])
def test_an_eos_as_the_last_token_there_is_room_for_ends_the_text_as_one(eos_ids, clock) -> None:
    drafter = Told(clock)
    steps = list(specexec(SlowTarget(ToyLM(0)), drafter, GREEDY, (1,), 3, eos_ids, everything))
    assert [step.finish_reason for step in steps] == ["eos" if eos_ids else "length"]
    plain = ToyTarget(ToyLM(0))
    end = GREEDY.token(torch.from_numpy(ToyLM(0).logits([1])), [1])
    found = list(autoregressive(plain, GREEDY, (1,), 1, {end} if eos_ids else ()))
    assert [step.finish_reason for step in found] == ["eos" if eos_ids else "length"]
