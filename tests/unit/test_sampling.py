"""Filters are transformers' own, in its order; draws are exact and keyed by (seed, position)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from checkpoints import architecture
from fake_cuda import CUDA, counted, fake_cuda
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from slot_toys import slot_drafter, slot_target
from torch import Tensor
from toys import NoisyCopy, ToyLM

from specexec_cli import sampling as sampling_module
from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.decoding.loop import specexec
from specexec_cli.errors import ConfigError, NonFiniteLogitsError
from specexec_cli.sampling import Sampler, gumbel_noise, noise_on, noise_there, uniforms

VOCAB = 40
PROMPT = (1, 2)


@pytest.fixture(scope="module")
def transformers_model() -> transformers.PreTrainedModel:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(architecture("llama"))


def own_filter(
    model: transformers.PreTrainedModel, config: SamplingConfig, logits: Tensor, context: list[int]
) -> Tensor:
    """What transformers' generate() would sample from, (vocab,)."""
    sampled = config.temperature > 0.0
    settings = {
        "temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p,
        "min_p": config.min_p or None,
    }  # fmt: skip
    generation = transformers.GenerationConfig(
        do_sample=sampled, repetition_penalty=config.repetition_penalty,
        **(settings if sampled else {}),
    )  # fmt: skip
    processors = model._get_logits_processor(
        generation_config=generation, input_ids_seq_length=len(context),
        logits_processor=transformers.LogitsProcessorList(), device="cpu",
    )  # fmt: skip
    return processors(torch.tensor([context]), logits.clone().float()[None])[0]


configs = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
)


@settings(max_examples=300, deadline=None)
@given(
    config=configs,
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 1.0, 6.0]),
    context=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(SamplingConfig(temperature=0.7, top_p=0.5), 0, 6.0, [1], torch.float32)
# most tokens have no chance at all, which is no reason to exclude them
@example(SamplingConfig(temperature=1.0), 0, 400.0, [1], torch.float32)
def test_filters_are_those_of_transformers(transformers_model, config, seed, scale, context, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(VOCAB, generator=generator) * scale).to(dtype)
    before = logits.clone()
    ours = Sampler(config).filtered(logits[None], context)[0]
    assert torch.equal(ours, own_filter(transformers_model, config, logits, context))
    assert torch.equal(logits, before), "the logits stay as they were"


def test_top_p_keeps_the_likeliest_tokens() -> None:
    """The reference implementation drops them instead."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    kept = Sampler(SamplingConfig(temperature=1.0, top_p=0.7)).filtered(logits, PROMPT)
    assert torch.isfinite(kept[0]).tolist() == [True, True, False, False]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40),
    vocab=st.integers(1, 300), more=st.integers(0, 300),
)  # fmt: skip
def test_noise_does_not_depend_on_vocabulary_padding(seed, position, vocab, more):
    long = gumbel_noise(seed, position, vocab + more)
    assert torch.equal(gumbel_noise(seed, position, vocab), long[:vocab])
    assert torch.isfinite(long).all()


def test_noise_is_gumbel_and_independent_over_positions_and_seeds() -> None:
    by_position = torch.stack([gumbel_noise(3, position, 50) for position in range(400)])
    by_seed = torch.stack([gumbel_noise(seed, 3, 50) for seed in range(400)])
    for noise in (by_position, by_seed):
        assert kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3
        correlation = np.corrcoef(noise.numpy()) - np.eye(400)
        assert abs(correlation).max() < 6 / math.sqrt(50)
        assert abs(correlation.mean()) < 1e-3


class _Strict(transformers.LogitsProcessor):
    """As transformers' first versions with a repetition penalty: an id beyond the scores fails."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        seen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, input_ids, True)
        return torch.where(seen, scores - 1.0, scores)


def test_context_beyond_the_vocabulary_is_passed_over() -> None:
    """A target may write ids that its draft model does not know."""
    sampler = Sampler(SamplingConfig(repetition_penalty=1.3))
    sampler._penalty = transformers.LogitsProcessorList([_Strict()])
    logits = torch.zeros(2, 8)
    found = sampler.filtered(logits, [1, 8, 3, 900])
    assert found.tolist() == sampler.filtered(logits, [1, 3]).tolist()
    assert found[1].tolist() == [0, -1, 0, -1, 0, 0, 0, 0]
    assert torch.equal(sampler.filtered(logits, [8]), logits)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_an_error(bad: float, temperature: float) -> None:
    logits = torch.tensor([0.0, bad, 1.0])
    with pytest.raises(NonFiniteLogitsError, match="position 2 are not finite"):
        Sampler(SamplingConfig(temperature=temperature)).token(logits, PROMPT)


def test_the_coldest_temperature_is_greedy() -> None:
    """Dividing by a tiny temperature must not overflow into infinities, which tie."""
    with pytest.raises(ConfigError, match="temperature"):
        SamplingConfig(temperature=1e-38)
    logits = torch.tensor([3.0, 9.0, 8.9, -4.0]) * 100
    coldest = SamplingConfig(temperature=0.001, top_p=0.9)
    assert {
        Sampler(SamplingConfig(temperature=0.001, seed=seed, top_p=0.9)).token(logits, PROMPT)
        for seed in range(50)
    } == {1}
    assert torch.isfinite(Sampler(coldest).filtered(logits[None], PROMPT)[0, 1])


@settings(max_examples=200, deadline=None)
@given(
    config=configs,
    seed=st.integers(0, 2**64 - 1),
    context=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
)
def test_a_token_is_the_arg_max_under_the_noise_of_its_position(
    transformers_model, config, seed, context
) -> None:
    """transformers' filters, then noise of (seed, position); none where decoding is greedy."""
    config = replace(config, seed=seed)
    logits = torch.from_numpy(ToyLM(seed % 1000, vocab_size=VOCAB).logits(context))
    scores = own_filter(transformers_model, config, logits, context)
    if config.temperature > 0.0:
        scores = scores + gumbel_noise(seed, len(context), VOCAB)
    assert Sampler(config).token(logits, context) == int(scores.argmax())


def test_the_lowest_token_wins_a_tie() -> None:
    logits = torch.tensor([1.0, 7.0, 7.0, -2.0, 7.0])
    assert Sampler(SamplingConfig()).token(logits, PROMPT) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_are_filtered_alike(temperature: float) -> None:
    """The rows of a draft step go through together, under one context."""
    rows = torch.from_numpy(np.stack([ToyLM(n, vocab_size=VOCAB).logits([n]) for n in range(5)]))
    config = SamplingConfig(temperature=temperature, top_k=9, repetition_penalty=1.5)
    together = Sampler(config).filtered(rows, [3, 4, 3])
    apart = [Sampler(config).filtered(row[None], [3, 4, 3])[0] for row in rows]
    assert torch.equal(together, torch.stack(apart))
    assert together.dtype == torch.float32


def test_a_temperature_may_be_a_whole_number() -> None:
    """transformers' own filter insists on a float."""
    logits = torch.tensor([[1.0, 4.0]])
    halved = Sampler(SamplingConfig(temperature=2)).filtered(logits, PROMPT)
    assert halved.tolist() == [[0.5, 2.0]]


@settings(max_examples=100, deadline=None)
@given(config=configs, context=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
def test_probs_are_those_that_transformers_would_draw_from(
    transformers_model, config, context
) -> None:
    logits = torch.from_numpy(ToyLM(3, vocab_size=VOCAB).logits(context))
    kept = own_filter(transformers_model, config, logits, context).double().exp()
    probs = Sampler(config).probs(logits, context)
    assert probs.dtype == np.float64
    np.testing.assert_allclose(probs, (kept / kept.sum()).numpy(), rtol=1e-9, atol=0.0)


def test_probs_of_damaged_logits_are_an_error() -> None:
    with pytest.raises(NonFiniteLogitsError, match="position 2 are not finite"):
        Sampler(SamplingConfig(temperature=1.0)).probs(torch.tensor([0.0, math.nan]), PROMPT)


@pytest.mark.parametrize("triton", [False, True])
def test_noise_moves_to_the_device_once(triton: bool) -> None:
    """All rows that predict a position, and the target after the draft model, use one copy."""
    noise_there.cache_clear()
    with fake_cuda(triton=triton):
        with counted() as found:
            moved = noise_on(CUDA, 5, 9, 30)
        assert (found.kernels, found.waits) == (int(triton), 0)
        assert moved.device == CUDA
        assert moved.cpu().tolist() == gumbel_noise(5, 9, 30).tolist()
        assert noise_on(CUDA, 5, 9, 30) is moved
        for position in (10, 11, 40):  # the next, which are drawn already, and another text's
            assert torch.equal(noise_on(CUDA, 5, position, 30).cpu(), gumbel_noise(5, position, 30))
    on_cpu = noise_on(torch.device("cpu"), 5, 9, 30)
    assert on_cpu is gumbel_noise(5, 9, 30)
    assert on_cpu.dtype == torch.float32


class Words:
    """In the place of numpy's generator: the words that it would draw, given beforehand."""

    def __init__(self, words: list[int]) -> None:
        self.words = np.array(words, dtype=np.uint64)

    def random_raw(self, count: int) -> np.ndarray:
        return self.words[:count]


def test_uniforms_use_the_52_highest_bits_and_leave_out_the_ends(monkeypatch) -> None:
    words = [0, 2**12 - 1, 2**12, 2**63, 2**64 - 2**12 - 1, 2**64 - 1]
    monkeypatch.setattr(np.random, "Philox", lambda **key: Words(words))
    eps = 2.0**-53
    expected = [eps, eps, 3 * eps, 0.5 + eps, 1.0 - 3 * eps, 1.0 - eps]
    assert uniforms(1, 2, 3, 6).tolist() == expected


def test_uniforms_are_keyed_by_seed_position_and_stream() -> None:
    """To the bit: texts of the methods that draw drafts depend on them."""
    assert uniforms(7, 11, 1, 2).tolist() == [0.3145269446853035, 0.6595911644712386]
    assert uniforms(7, 11, 2, 2).tolist() == [0.7760086190381282, 0.3529000316167604]
    draws = {
        key: tuple(uniforms(*key, 40).tolist())
        for key in itertools.product((0, 7, 2**64 - 1), (0, 1, 2**40), (1, 2, 3))
    }
    assert len(set(draws.values())) == len(draws)
    assert kstest(np.concatenate(list(draws.values())), "uniform").pvalue > 1e-3
    assert tuple(uniforms(7, 1, 2, 9)) == draws[7, 1, 2][:9]
    noise = [gumbel_noise(7, position, 40).double() for position in (1, 2**40)]
    for (seed, position, _), drawn in draws.items():
        if seed == 7 and position:
            own = noise[position > 1].neg().exp().neg().exp().numpy()
            assert abs(np.corrcoef(own, drawn)[0, 1]) < 0.6, "independent of the noise"


# The chi-square tests: the joint distribution of the first two tokens over many seeds, through the
# whole of SpecExec with its real drafter, against what transformers' filters give.

MODEL = ToyLM(5, vocab_size=6, scale=1.0)
CONFIG = {"temperature": 0.7, "top_p": 0.9}
SEEDS = 1500
REJECT = 1e-4  # seeds are fixed, so a right sampler passes always


def observed_pairs(seeds: int, **changes: float) -> Counter[tuple[int, int]]:
    """(first, second) token counts over `seeds` seeds."""
    counts: Counter[tuple[int, int]] = Counter()
    tree = TreeConfig(budget=4, max_depth=2, batch=2)
    for seed in range(seeds):
        config = SamplingConfig(**{**CONFIG, **changes}, seed=seed)  # type: ignore[arg-type]
        drafter = slot_drafter(NoisyCopy(MODEL, 1, 0.5), config, tree)
        steps = specexec(slot_target(MODEL), drafter, Sampler(config), PROMPT, 2, ())
        first, second = (token for step in steps for token in step.tokens)
        counts[first, second] += 1
    return counts


@pytest.fixture(scope="module")
def expected_pairs(transformers_model) -> dict[tuple[int, int], float]:
    def probabilities(context: list[int]) -> list[float]:
        logits = torch.from_numpy(MODEL.logits(context))
        filtered = own_filter(transformers_model, SamplingConfig(**CONFIG), logits, context)
        return filtered.double().softmax(-1).tolist()

    first = probabilities(list(PROMPT))
    return {
        (a, b): first[a] * second
        for a in range(6)
        if first[a]
        for b, second in enumerate(probabilities([*PROMPT, a]))
        if second
    }


def p_value(counts: Counter[tuple[int, int]], expected: dict[tuple[int, int], float]) -> float:
    if set(counts) - set(expected):
        return 0.0  # a token that the filters exclude
    total = sum(counts.values())
    assert min(expected.values()) * total > 2, "cells large enough for the approximation"
    observed = [counts[pair] for pair in expected]
    return float(chisquare(observed, [p * total for p in expected.values()]).pvalue)


def test_sampled_text_has_the_target_s_distribution(expected_pairs) -> None:
    assert len(expected_pairs) >= 8
    assert p_value(observed_pairs(SEEDS), expected_pairs) > REJECT


def test_the_chi_square_test_rejects_wrong_samplers(expected_pairs, monkeypatch) -> None:
    """Another temperature, another nucleus, the same noise at every position, skewed noise."""
    assert p_value(observed_pairs(500, temperature=1.0), expected_pairs) < REJECT
    assert p_value(observed_pairs(500, top_p=0.8), expected_pairs) < REJECT
    right = gumbel_noise
    monkeypatch.setattr(sampling_module, "gumbel_noise", lambda seed, at, n: right(seed, 0, n))
    assert p_value(observed_pairs(500), expected_pairs) < REJECT
    monkeypatch.setattr(
        sampling_module, "gumbel_noise", lambda seed, at, n: 0.8 * right(seed, at, n)
    )
    assert p_value(observed_pairs(500), expected_pairs) < REJECT
