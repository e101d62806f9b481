"""The paper's theorems on whole runs, and losslessness, with the orchestrator itself.

Latencies are whole numbers, so that equal times are equal.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from toys import NoisyCopy, ToyLM, ToyTarget

from specexec_cli.config import SamplingConfig
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.dsi.messages import DRAFTER
from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.lab.simulate.clock import Latencies, VirtualWorkers
from specexec_cli.lab.simulate.methods import run_autoregressive, run_dsi, run_speculative
from specexec_cli.sampling import Sampler

acceptances = st.lists(st.booleans(), min_size=1, max_size=40)
ENOUGH = 64


@settings(max_examples=300, deadline=None)
@given(
    accepted=acceptances,
    target=st.integers(1, 40),
    draft=st.integers(1, 60),
    lookahead=st.integers(1, 12),
    servers=st.integers(1, 5),
)
def test_theorem_1_never_slower_than_no_speculation(accepted, target, draft, lookahead, servers):
    """Here for any number of servers and any lookahead: an urgent task never waits."""
    latencies = Latencies(target_s=target, draft_s=draft)
    plain = run_autoregressive(latencies, len(accepted)).seconds
    assert run_dsi(latencies, accepted, lookahead, servers).seconds <= plain


@settings(max_examples=300, deadline=None)
@given(
    accepted=acceptances,
    draft=st.integers(1, 10),
    lookahead=st.integers(1, 8),
    slack=st.integers(0, 20),
)
def test_theorem_2_never_slower_than_speculative_inference(accepted, draft, lookahead, slack):
    """Under its assumptions, enough servers and k c <= t, on every single text."""
    latencies = Latencies(target_s=lookahead * draft + slack, draft_s=draft)
    si = run_speculative(latencies, accepted, lookahead).seconds
    assert run_dsi(latencies, accepted, lookahead, ENOUGH).seconds <= si


def test_theorem_2_does_not_hold_where_drafts_take_longer_than_a_pass():
    """k c = 4 and t = 3. SI has three tokens after 4 + 3 and the last one after 3 more: 10."""
    latencies, accepted = Latencies(target_s=3, draft_s=2), [True, True, False, False]
    assert run_speculative(latencies, accepted, 2).seconds == 10
    assert run_dsi(latencies, accepted, 2, ENOUGH).seconds == 12


@settings(max_examples=200, deadline=None)
@given(accepted=acceptances, draft=st.integers(1, 10), more=st.integers(1, 30))
def test_proposition_1_for_every_finite_text(accepted, draft, more):
    """t1 Q + t2 ((N - 1 - Q) + 1) at most, Q being the right drafts among the first N - 1 tokens.

    The proof holds text by text; with E[Q] = p (N - 1) it is the printed bound.
    """
    target = draft + more
    right = sum(accepted[:-1])
    bound = draft * right + target * (len(accepted) - 1 - right + 1)
    latencies = Latencies(target_s=target, draft_s=draft)
    assert run_dsi(latencies, accepted, 1, ENOUGH).seconds <= bound


def test_proposition_1_by_hand():
    """N = 4, t1 = 1, t2 = 3; right, wrong, right: 2 * 1 + 3 * (1 + 1) = 8, reached exactly."""
    found = run_dsi(Latencies(target_s=3, draft_s=1), [True, False, True, True], 1, ENOUGH)
    assert found.seconds == 8


samplings = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=150, deadline=None)
@given(
    model_seed=st.integers(0, 2**32),
    noise=st.sampled_from([0.0, 0.3, 1.0, 10.0]),
    sampling=samplings,
    servers=st.integers(1, 4),
    lookahead=st.integers(1, 8),
    latencies=st.builds(
        Latencies,
        target_s=st.floats(0.1, 10.0),
        draft_s=st.floats(0.1, 10.0),
        target_row_s=st.floats(0.0, 1.0),
        prefill_s=st.floats(0.0, 20.0),
        abort_s=st.floats(0.0, 5.0),
    ),
    deaths=st.lists(st.tuples(st.integers(DRAFTER, 2), st.floats(0.0, 60.0)), max_size=4),
    tokens=st.integers(1, 24),
)
def test_any_timing_yields_the_autoregressive_tokens(
    model_seed, noise, sampling, servers, lookahead, latencies, deaths, tokens
):
    """Random latencies, rejections and deaths, as long as one server lives."""
    model, sampler, prompt = ToyLM(model_seed), Sampler(sampling), (1, 2, 3)
    draft = NoisyCopy(model, 1, noise)
    steps = autoregressive(ToyTarget(model), sampler, prompt, tokens, ())
    expected = [token for step in steps for token in step.tokens]

    def draw(lm, sequence, position):
        import torch

        context = list(sequence[:position])
        return sampler.token(torch.from_numpy(lm.logits(context)), context)

    workers = VirtualWorkers(
        latencies,
        lambda sequence, position: draw(model, sequence, position),
        lambda sequence, position: draw(draft, sequence, position),
        servers,
    )
    for worker, at_s in deaths:
        if worker < servers - 1:
            workers.kill(worker, at_s)
    orchestrator = Orchestrator(workers, DsiConfig(lookahead=lookahead), lambda line: None)
    committed = [t for c in orchestrator.generate(prompt, tokens) for t in c.tokens]
    assert committed == expected


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), ends=st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_texts_ended_early_do_not_leak_into_the_next(seed, ends):
    """Ctrl-C or an EOS leaves stale passes behind; the next text must not see them."""
    numbers = random.Random(seed)
    agree = [numbers.random() < 0.7 for _ in range(64)]
    workers = VirtualWorkers(
        Latencies(target_s=10.0, draft_s=1.0, abort_s=3.0),
        lambda sequence, position: sequence[0] + position,
        lambda sequence, position: sequence[0] + position if agree[position] else -1,
        3,
    )
    orchestrator = Orchestrator(workers, DsiConfig(lookahead=2))
    for number, end in enumerate(ends):
        first = 100 * (number + 1)
        text: list[int] = []
        commits = orchestrator.generate([first], 24)
        while len(text) < end:
            text += next(commits).tokens
        commits.close()
        assert text == [first + position for position in range(1, len(text) + 1)]
