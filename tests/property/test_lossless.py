"""Any draft model, any tree: the tokens of plain autoregressive decoding."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import NoisyCopy, ToyDrafter, ToyLM, ToyTarget

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.suffix import SuffixDrafter
from specexec_cli.sampling import Sampler

seeds = st.integers(0, 2**32)
samplings = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    top_k=st.sampled_from([0, 1, 3]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=seeds,
)


@st.composite
def trees(draw: st.DrawFn) -> TreeConfig:
    budget = draw(st.integers(1, 24))
    return TreeConfig(
        budget=budget,
        max_depth=draw(st.integers(1, min(budget, 6))),
        batch=draw(st.integers(1, 8)),
        scoring=draw(st.sampled_from(["noise", "probs"])),
        policy=draw(st.sampled_from(["fixed", "heuristic", "disco", "cost"])),
        calibrated=draw(st.booleans()),
    )


def tokens_of(steps: object) -> list[int]:
    return [token for step in steps for token in step.tokens]  # type: ignore[attr-defined]


drafts = st.fixed_dictionaries(
    {
        "target": seeds,
        "draft": seeds,
        "noise": st.sampled_from([0.0, 0.3, 1.0, 10.0]),
        "sampling": samplings,
        "tree": trees(),
        "max_tokens": st.integers(1, 20),
        "eos_ids": st.sets(st.integers(0, 7), max_size=2),
    }
)


def assert_the_autoregressive_tokens(target, draft, noise, sampling, tree, max_tokens, eos_ids):
    model, prompt = ToyLM(target), (1, 2)
    drafter = ToyDrafter(NoisyCopy(model, draft, noise), tree, Sampler(sampling))
    ours = list(specexec(ToyTarget(model), drafter, Sampler(sampling), prompt, max_tokens, eos_ids))
    oracle = list(autoregressive(ToyTarget(model), Sampler(sampling), prompt, max_tokens, eos_ids))
    assert tokens_of(ours) == tokens_of(oracle)
    assert ours[-1].finish_reason == oracle[-1].finish_reason
    assert len(tokens_of(ours)) <= max_tokens


@settings(max_examples=400, deadline=None)
@given(drafts)
def test_any_draft_yields_the_autoregressive_tokens(drawn):
    assert_the_autoregressive_tokens(**drawn)


@settings(max_examples=2000, deadline=None)
@given(drafts)
def test_two_thousand_drafts_yield_the_autoregressive_tokens(drawn):
    assert_the_autoregressive_tokens(**drawn)


@settings(max_examples=500, deadline=None)
@given(
    target=seeds,
    order=st.integers(1, 2),
    sampling=samplings,
    tree=trees().filter(lambda tree: tree.policy != "disco"),
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    max_tokens=st.integers(1, 20),
)
def test_the_texts_own_past_yields_the_autoregressive_tokens(
    target, order, sampling, tree, prompt, max_tokens
):
    model, sampler = ToyLM(target, vocab_size=4, order=order), Sampler(sampling)
    drafter = SuffixDrafter(sampler, tree)
    ours = list(specexec(ToyTarget(model), drafter, sampler, prompt, max_tokens, ()))
    oracle = list(autoregressive(ToyTarget(model), sampler, prompt, max_tokens, ()))
    assert tokens_of(ours) == tokens_of(oracle)
    assert all(step.tree_nodes <= tree.budget for step in ours)


def test_a_perfect_draft_commits_many_tokens_per_pass():
    """The equality above would also hold for a tree that never helps: it must help."""
    model, target = ToyLM(0), ToyTarget(ToyLM(0))
    tree = TreeConfig(budget=64, max_depth=8, batch=4)
    drafter = ToyDrafter(NoisyCopy(model, 1, 0.0), tree)
    steps = list(specexec(target, drafter, Sampler(SamplingConfig()), (1, 2), 64, ()))
    assert len(tokens_of(steps)) == 64
    assert target.passes < 20


def test_knowing_the_noise_commits_more_tokens_per_pass():
    """Sampled text: a draft that ranks by the target's own noise finds it more often."""
    passes = {}
    for scoring in ("noise", "probs"):
        passes[scoring] = 0
        tree = TreeConfig(budget=16, max_depth=8, batch=4, scoring=scoring)
        for seed in range(8):
            model = ToyLM(seed)
            target, sampler = ToyTarget(model), Sampler(SamplingConfig(temperature=1.0, seed=seed))
            drafter = ToyDrafter(NoisyCopy(model, seed, 0.3), tree, sampler)
            list(specexec(target, drafter, sampler, (1, 2), 64, ()))
            passes[scoring] += target.passes
    assert passes["noise"] < 0.7 * passes["probs"]


@pytest.mark.parametrize("eos", [True, False])
def test_nothing_is_committed_behind_an_eos_inside_a_burst(eos):
    model = ToyLM(3)
    drafter = ToyDrafter(NoisyCopy(model, 0, 0.0), TreeConfig(budget=64, max_depth=8, batch=4))
    plain = tokens_of(autoregressive(ToyTarget(model), Sampler(SamplingConfig()), (1,), 12, ()))
    end = plain[3]
    eos_ids = {end} if eos else ()
    steps = list(specexec(ToyTarget(model), drafter, Sampler(SamplingConfig()), (1,), 12, eos_ids))
    expected = plain[: plain.index(end) + 1] if eos else plain
    assert tokens_of(steps) == expected
    assert steps[-1].finish_reason == ("eos" if eos else "length")


@settings(max_examples=20, deadline=None)
@given(
    target=seeds,
    noise=st.sampled_from([0.1, 0.3, 1.0]),
    sampling=samplings,
    tree=trees(),
    max_tokens=st.integers(100, 160),
    ending=st.booleans(),
)
def test_long_texts_are_the_autoregressive_ones(target, noise, sampling, tree, max_tokens, ending):
    """Long enough for policies and calibration to have learned, and for every depth to come."""
    model, sampler = ToyLM(target), Sampler(sampling)
    plain = tokens_of(autoregressive(ToyTarget(model), sampler, (1, 2), max_tokens, ()))
    # the token that comes latest for the first time: with 8 tokens in all, often an early one
    end = max(set(plain), key=plain.index)
    eos_ids = {end} if ending else set()
    drafter = ToyDrafter(NoisyCopy(model, target + 1, noise), tree, sampler)
    ours = list(specexec(ToyTarget(model), drafter, sampler, (1, 2), max_tokens, eos_ids))
    assert tokens_of(ours) == (plain[: plain.index(end) + 1] if ending else plain)
    assert [step.finish_reason for step in ours[:-1]] == [None] * (len(ours) - 1)
    assert ours[-1].finish_reason == ("eos" if ending else "length")
