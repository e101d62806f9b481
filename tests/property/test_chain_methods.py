"""Chains, sampled trees and beams: same tokens, or same distribution, as their method promises."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_toys import Cached, Clock, TimedTarget, ToySampledDrafter
from scipy.stats import chisquare
from test_lossless import samplings, seeds, tokens_of
from toys import NoisyCopy, ToyDrafter, ToyLM, ToyTarget

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.decoding.loop import specexec
from specexec_cli.lab.baselines.searches import grow_beam, grow_beam_pruned, grow_bundle, grow_chain
from specexec_cli.lab.bench.metrics import improvement_factor
from specexec_cli.sampling import Sampler


@st.composite
def shapes(draw: st.DrawFn) -> TreeConfig:
    depth = draw(st.integers(1, 5))
    return TreeConfig(budget=draw(st.integers(depth, 20)), max_depth=depth)


@settings(max_examples=250, deadline=None)
@given(
    target=seeds,
    draft=seeds,
    noise=st.sampled_from([0.0, 0.3, 1.0]),
    search=st.sampled_from([grow_chain, grow_beam, grow_beam_pruned]),
    sampling=samplings,
    tree=shapes(),
    max_tokens=st.integers(1, 12),
)
def test_chains_and_beams_yield_the_autoregressive_tokens(
    target, draft, noise, search, sampling, tree, max_tokens
):
    model, sampler = ToyLM(target), Sampler(sampling)
    drafter = ToyDrafter(NoisyCopy(model, draft, noise), tree, sampler, search)
    steps = list(specexec(ToyTarget(model), drafter, sampler, (1, 2), max_tokens, ()))
    plain = list(autoregressive(ToyTarget(model), sampler, (1, 2), max_tokens, ()))
    assert tokens_of(steps) == tokens_of(plain)
    assert all(step.tree_nodes <= tree.budget for step in steps)
    assert all(step.tree_depth <= tree.max_depth for step in steps)


@pytest.mark.parametrize("policy", ["fixed", "heuristic", "disco"])
@pytest.mark.parametrize("search", [grow_chain, grow_beam, grow_beam_pruned])
def test_long_chains_and_beams_yield_the_autoregressive_tokens(search, policy):
    """Long enough for a policy to have gone through its range of sizes."""
    sampling = {
        grow_chain: SamplingConfig(temperature=0.8, seed=1),
        grow_beam: SamplingConfig(),
        grow_beam_pruned: SamplingConfig(temperature=1.0, top_k=3, seed=2),
    }[search]
    tree = TreeConfig(budget=24, max_depth=8, policy=policy)
    model, sampler = ToyLM(sampling.seed), Sampler(sampling)
    drafter = ToyDrafter(NoisyCopy(model, 5, 0.2), tree, sampler, search)
    steps = list(specexec(ToyTarget(model), drafter, sampler, (1, 2), 120, ()))
    plain = autoregressive(ToyTarget(model), sampler, (1, 2), 120, ())
    assert tokens_of(steps) == tokens_of(plain)
    assert len({step.tree_depth for step in steps}) > 2 or policy == "fixed"


@settings(max_examples=150, deadline=None)
@given(
    target=seeds,
    draft=seeds,
    search=st.sampled_from([grow_chain, grow_bundle]),
    tree=shapes(),
    max_tokens=st.integers(1, 12),
    eos_ids=st.sets(st.integers(0, 7), max_size=2),
)
def test_greedy_rejection_sampling_yields_the_autoregressive_tokens(
    target, draft, search, tree, max_tokens, eos_ids
):
    model, sampler = ToyLM(target), Sampler(SamplingConfig())
    drafter = ToySampledDrafter(NoisyCopy(model, draft, 0.5), tree, sampler, search)
    steps = specexec(ToyTarget(model), drafter, sampler, (1, 2), max_tokens, eos_ids, drafter.walk)
    plain = autoregressive(ToyTarget(model), sampler, (1, 2), max_tokens, eos_ids)
    assert tokens_of(steps) == tokens_of(plain)


@settings(max_examples=150, deadline=None)
@given(
    target=seeds,
    draft=seeds,
    search=st.sampled_from([grow_chain, grow_bundle]),
    sampling=samplings,
    tree=shapes(),
    max_tokens=st.integers(1, 12),
    eos_ids=st.sets(st.integers(0, 7), max_size=2),
)
def test_sampled_trees_end_where_they_should(
    target, draft, search, sampling, tree, max_tokens, eos_ids
):
    model, sampler = ToyLM(target), Sampler(sampling)

    def run() -> list:
        drafter = ToySampledDrafter(NoisyCopy(model, draft, 0.5), tree, sampler, search)
        return list(
            specexec(ToyTarget(model), drafter, sampler, (1, 2), max_tokens, eos_ids, drafter.walk)
        )

    tokens = tokens_of(run())
    assert tokens == tokens_of(run()), "the seed decides"
    assert 1 <= len(tokens) <= max_tokens
    assert not eos_ids & set(tokens[:-1]), "nothing follows an EOS"
    assert len(tokens) == max_tokens or tokens[-1] in eos_ids


VOCAB, LENGTH, _SAMPLES = 3, 3, 1200
TARGET = ToyLM(11, vocab_size=VOCAB, scale=1.0)
PLAIN = {"temperature": 1.0}
_FILTERED = {"temperature": 0.8, "top_p": 0.9}


def exact(sampling: dict[str, float]) -> np.ndarray:
    """Probability of every text of LENGTH tokens behind the prompt (1, 2)."""
    sampler = Sampler(SamplingConfig(**sampling))
    probs = []
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        context, prob = [1, 2], 1.0
        for token in text:
            logits = torch.from_numpy(TARGET.logits(context))
            prob *= float(sampler.probs(logits, context)[token])
            context.append(token)
        probs.append(prob)
    return np.array(probs)


def p_value(counts: np.ndarray, exact: np.ndarray) -> float:
    """Chi-square test; texts expected fewer than 5 times are taken together."""
    assert counts[exact == 0].sum() == 0, "a text that the target excludes"
    expected = exact * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    return float(chisquare(observed[kept], expected[kept]).pvalue)


def _counts(search, tree: TreeConfig, draft, target, sampling: dict[str, float]) -> np.ndarray:
    draft, target = Cached(draft), Cached(target)
    counts = np.zeros(VOCAB**LENGTH)
    for seed in range(_SAMPLES):
        sampler = Sampler(SamplingConfig(seed=seed, **sampling))
        drafter = ToySampledDrafter(draft, tree, sampler, search)
        steps = specexec(ToyTarget(target), drafter, sampler, (1, 2), LENGTH, (), drafter.walk)
        counts[np.ravel_multi_index(tokens_of(steps), (VOCAB,) * LENGTH)] += 1
    return counts


@pytest.mark.parametrize(
    ("search", "tree", "sampling"),
    [
        (grow_chain, TreeConfig(budget=2, max_depth=2), PLAIN),
        (grow_chain, TreeConfig(budget=1, max_depth=1), _FILTERED),
        (grow_chain, TreeConfig(budget=2, max_depth=2, policy="disco"), PLAIN),
        (grow_bundle, TreeConfig(budget=4, max_depth=2), PLAIN),
        (grow_bundle, TreeConfig(budget=6, max_depth=2), _FILTERED),
    ],
)
def test_sampled_text_has_the_distribution_of_the_target(search, tree, sampling):
    draft = NoisyCopy(TARGET, 5, 1.0)
    assert p_value(_counts(search, tree, draft, TARGET, sampling), exact(sampling)) > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_disco_ends_drawn_chains_at_different_lengths(temperature):
    """Mamou et al., arXiv:2405.04304, section 3, with rejection sampling as it is there."""
    model, sampler = ToyLM(3), Sampler(SamplingConfig(temperature=temperature, seed=1))
    tree = TreeConfig(budget=8, max_depth=8, policy="disco")
    drafter = ToySampledDrafter(NoisyCopy(model, 5, 0.2), tree, sampler, grow_chain)
    steps = list(specexec(ToyTarget(model), drafter, sampler, (1, 2), 80, (), drafter.walk))
    # the last chains have no room for more
    assert len({step.tree_nodes for step in steps[:-2]}) > 1
    if temperature == 0.0:
        plain = autoregressive(ToyTarget(model), sampler, (1, 2), 80, ())
        assert tokens_of(steps) == tokens_of(plain)


def test_the_chi_square_test_tells_a_draft_from_the_target():
    """The test above must be able to fail: the text of another model does not pass."""
    other = NoisyCopy(TARGET, 5, 0.3)
    counts = _counts(grow_chain, TreeConfig(budget=2, max_depth=2), other, other, PLAIN)
    assert p_value(counts, exact(PLAIN)) < 1e-4


def test_more_branches_commit_more_tokens():
    """Rejected children must not only be harmless: further ones must be of use."""
    passes = {}
    for width in (1, 2, 4):
        passes[width] = 0
        for seed in range(12):
            sampler = Sampler(SamplingConfig(temperature=1.0, seed=seed))
            target, model = ToyTarget(ToyLM(seed)), NoisyCopy(ToyLM(seed), 7, 0.5)
            tree = TreeConfig(budget=4 * width, max_depth=4)
            drafter = ToySampledDrafter(model, tree, sampler, grow_bundle)
            list(specexec(target, drafter, sampler, (1, 2), 40, (), drafter.walk))
            passes[width] += target.passes
    assert passes[1] > passes[2] > passes[4]


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("noise", [0.15, 0.6])
@pytest.mark.parametrize("cost_ratio", [0.02, 0.2])
def test_the_improvement_factor_predicts_the_measured_speedup(length, noise, cost_ratio):
    clock, accepted, tested, generated = Clock(), 0, 0, 0
    for seed in range(4):
        model = ToyLM(seed, scale=1.5)
        sampler = Sampler(SamplingConfig(temperature=1.0, seed=seed))
        tree = TreeConfig(budget=length, max_depth=length)
        draft = NoisyCopy(model, seed, noise)
        drafter = ToySampledDrafter(draft, tree, sampler, grow_chain, clock, cost_ratio)
        for step in specexec(TimedTarget(model, clock=clock), drafter, sampler,
                                       (1, 2), 120, (), drafter.walk):  # fmt: skip
            kept = sum(step.drafted)
            accepted += kept
            tested += kept + (kept < step.tree_nodes)
            generated += len(step.tokens)
    measured = generated / clock.now  # the baseline takes one second per token
    predicted = improvement_factor(accepted / tested, length, cost_ratio)
    assert measured == pytest.approx(predicted, rel=0.1)
