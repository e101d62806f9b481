"""DSI with several drafters and with rejection sampling: algorithm 1 of the paper, beyond one pair.

Latencies of the tests about time are whole numbers, so that equal times are equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from method_toys import Cached
from test_chain_methods import LENGTH, PLAIN, TARGET, VOCAB, exact, p_value
from toys import NoisyCopy

from specexec_cli.dsi.messages import DRAFTER, Draft, Drafted, Verified, Verify
from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.lab.simulate.clock import Latencies, VirtualWorkers
from specexec_cli.sampling import uniforms
from specexec_cli.verify.rejection import DRAFT_STREAM, draw, settle

ENOUGH = 64


def position_itself(sequence: Sequence[int], position: int) -> int:
    return position


def right_where(accepted: Sequence[bool]) -> Callable[[Sequence[int], int], int]:
    return lambda sequence, position: position if accepted[position - 1] else -1


def run(
    drafters: Sequence[tuple[Sequence[bool], float]],
    tokens: int,
    target_s: float,
    lookahead: int = 1,
    servers: int = ENOUGH,
) -> tuple[list[int], VirtualWorkers]:
    """A text of drafters that are right where they are said to be, each with its latency."""
    (accepted, draft_s), *more = drafters
    workers = VirtualWorkers(
        Latencies(target_s=target_s, draft_s=draft_s), position_itself, right_where(accepted),
        servers, [(right_where(others), seconds) for others, seconds in more],
    )  # fmt: skip
    commits = Orchestrator(workers, DsiConfig(lookahead=lookahead)).generate([0], tokens)
    return [token for commit in commits for token in commit.tokens], workers


def test_two_drafters_by_hand():
    """Algorithm 1 with f_1, f_2 and the target f_3; 1, 1 and 3 time units; four tokens.

    f_1 is wrong at the second position, f_2 is right everywhere. C_(3) ends at 3; C_(1,3), of the
    token that f_1 and f_2 share, at 4: f_1's threads end there, and j* = 2 goes on; C_(2,2,3) and
    C_(2,2,2,3) end at 5 and 6. With f_1 alone the third position is begun anew at 4 and ends at 7,
    the fourth, drafted meanwhile, at 8.
    """
    wrong, right = [True, False, True, True], [True] * 4
    assert run([(wrong, 1)], 4, 3)[1].now() == 8
    text, workers = run([(wrong, 1), (right, 1)], 4, 3)
    assert text == [1, 2, 3, 4]
    assert workers.now() == 6
    # line 9: what both drafted is verified once, for the first of them
    assert run([(right, 1), (right, 1)], 4, 3)[1].forwards == run([(right, 1)], 4, 3)[1].forwards


drafter = st.tuples(st.lists(st.booleans(), min_size=24, max_size=24), st.integers(1, 30))


@settings(max_examples=150, deadline=None)
@given(
    drafters=st.lists(drafter, min_size=1, max_size=3),
    tokens=st.integers(1, 24),
    target=st.integers(1, 40),
    lookahead=st.integers(1, 6),
    servers=st.integers(1, 6),
)
def test_theorem_1_with_any_drafters(drafters, tokens, target, lookahead, servers):
    """The target's tokens, never later than without speculation, however few servers there are."""
    text, workers = run(drafters, tokens, target, lookahead, servers)
    assert text == list(range(1, tokens + 1))
    assert workers.now() <= tokens * target


@settings(max_examples=100, deadline=None)
@given(
    accepted=st.lists(st.booleans(), min_size=24, max_size=24),
    more=st.lists(drafter, min_size=1, max_size=2),
    draft=st.integers(1, 8),
    slack=st.integers(0, 20),
)
def test_a_further_drafter_never_costs_time(accepted, more, draft, slack):
    """Algorithm 1 as it is, a task for each token, with servers enough and the fastest first.

    With a longer lookahead blocks begin elsewhere, and some texts take a little longer.
    """
    target = draft + slack
    alone = run([(accepted, draft)], 24, target)[1].now()
    others = [(right, max(draft, seconds)) for right, seconds in more]
    assert run([(accepted, draft), *others], 24, target)[1].now() <= alone


@settings(max_examples=100, deadline=None)
@given(
    drafters=st.lists(drafter, min_size=2, max_size=3),
    lookahead=st.integers(1, 6),
    servers=st.integers(2, 4),
    deaths=st.lists(st.tuples(st.integers(DRAFTER - 2, 0), st.floats(0.0, 200.0)), max_size=3),
)
def test_lost_drafters_and_servers_change_no_token(drafters, lookahead, servers, deaths):
    (accepted, draft_s), *more = drafters
    workers = VirtualWorkers(
        Latencies(target_s=10.0, draft_s=draft_s, abort_s=3.0), position_itself,
        right_where(accepted), servers, [(right_where(others), s) for others, s in more],
    )  # fmt: skip
    for worker, at_s in deaths:
        workers.kill(worker, at_s)
    reports: list[str] = []
    orchestrator = Orchestrator(workers, DsiConfig(lookahead=lookahead), reports.append)
    for _ in range(2):
        commits = orchestrator.generate([0], 20)
        assert [token for c in commits for token in c.tokens] == list(range(1, 21))
    assert all("DSI drafter " in line or "target server 0" in line for line in reports)


class DrawnWorkers(VirtualWorkers):
    """Drafters that draw from their own distributions, and a target that tests what they drew.

    Args:
        shared: whether all drafters draw a position with the same random number, as
            engine.ModelDrafter does, or each with one of its own.
    """

    def __init__(
        self, latencies: Latencies, seed: int, target, drafts, servers: int, shared: bool
    ) -> None:
        more = [(position_itself, latencies.draft_s * 2.5)] * (len(drafts) - 1)
        super().__init__(latencies, position_itself, position_itself, servers, more)
        self._models = {DRAFTER - number: model for number, model in enumerate(drafts)}
        self._target_model, self._seed, self._shared = target, seed, shared

    def judge(self, probs, draft, position: int) -> int:
        token, proposal = ((), probs) if draft is None else ((draft[0],), draft[1])
        return settle(probs, proposal, token, self._seed, position)[0]

    def _verified(self, server: int, task: Verify, seconds: float) -> Verified:
        draws: list[int] = []
        for position, proposal in enumerate(task.proposals, task.first):
            probs = softmax(self._target_model.logits(task.tokens[:position]))
            draws.append(self.judge(probs, (task.tokens[position], proposal), position))
            if draws[-1] != task.tokens[position]:
                return Verified(server, task.task, tuple(draws), seconds)
        filled = task.first > len(task.tokens)
        bonus = None if filled else softmax(self._target_model.logits(task.tokens))
        return Verified(server, task.task, tuple(draws), seconds, bonus=bonus)

    def _drafted(self, order: Draft, sequence: Sequence[int]) -> Drafted:
        probs = softmax(self._models[order.drafter].logits(sequence))
        position = len(sequence)
        # the streams of the target's tests stay apart
        number = 0 if self._shared else DRAFTER - order.drafter
        uniform = uniforms(self._seed, position, DRAFT_STREAM, 3)[number]
        return Drafted(order.epoch, position, draw(probs, uniform), order.drafter, probs)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64) - logits.max())
    return powers / powers.sum()


def counts_of(
    drafts: Sequence[NoisyCopy], target, samples: int, shared: bool = True
) -> tuple[np.ndarray, float]:
    """How often each text came, over random timings; and the share of tokens that were drafted."""
    target, models = Cached(target), [Cached(draft) for draft in drafts]
    counts, drafted = np.zeros(VOCAB**LENGTH), 0
    for seed in range(samples):
        numbers = random.Random(seed)
        latencies = Latencies(target_s=1.0, draft_s=numbers.choice([0.05, 0.3, 0.7, 1.5]))
        workers = DrawnWorkers(latencies, seed, target, models, numbers.randint(1, 4), shared)
        orchestrator = Orchestrator(workers, DsiConfig(lookahead=numbers.randint(1, 2)))
        commits = list(orchestrator.generate([1, 2], LENGTH, judge=workers.judge))
        text = [token for commit in commits for token in commit.tokens]
        drafted += sum(sum(commit.drafted) for commit in commits)
        counts[np.ravel_multi_index(text, (VOCAB,) * LENGTH)] += 1
    return counts, drafted / (samples * LENGTH)


@pytest.mark.parametrize(
    ("seeds", "shared"),
    [((5,), True), ((5, 6), True), ((5, 6), False)],
    ids=["one drafter", "two that share a random number", "two with numbers of their own"],
)
def test_rejection_sampling_keeps_the_distribution_of_the_target(seeds, shared):
    """Under any timing: some tokens are tests of a draft, some the target's own draw."""
    drafts = [NoisyCopy(TARGET, seed, 1.0) for seed in seeds]
    counts, drafted = counts_of(drafts, TARGET, 1500, shared)
    assert p_value(counts, exact(PLAIN)) > 1e-3
    # of three tokens the last is never drafted, and half of the drafters are slow
    assert drafted > 0.15, "drafts were kept: the test is of them"


@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_drafters_that_share_a_random_number_have_the_committed_token_more_often(noise):
    """The second of two, whatever became of the first one's token."""
    numbers = np.random.default_rng(0)
    logits = 2 * numbers.normal(size=16)
    target, first, second = (
        softmax(logits + scale * numbers.normal(size=16)) for scale in (0.0, noise, noise)
    )
    agreed = {"shared": 0, "own": 0}
    for position in range(2000):
        shared, own = numbers.random(2).tolist()
        token, _ = settle(target, first, [draw(first, shared)], 7, position)
        agreed["shared"] += draw(second, shared) == token
        agreed["own"] += draw(second, own) == token
    assert agreed["shared"] > agreed["own"] + 40


def test_the_chi_square_test_tells_a_draft_from_the_target():
    """The test above must be able to fail: where the draft model judges, its own text comes."""
    other = NoisyCopy(TARGET, 5, 0.3)
    counts, _ = counts_of([other], other, 400)
    assert p_value(counts, exact(PLAIN)) < 1e-4
