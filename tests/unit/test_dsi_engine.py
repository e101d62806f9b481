"""Real (tiny) models behind the workers: the text of plain decoding, and caches always right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import chain_logits, open_float32, save_pair

from specexec_cli.config import SamplingConfig
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.dsi.engine import CachedModel, ModelDrafter, ModelTarget
from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.dsi.workers import ThreadWorkers
from specexec_cli.models.rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget

PROMPT = [1, 40, 80, 120, 160, 33, 34, 35]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"), noise=0.02)


@pytest.fixture(scope="module")
def models(pair) -> Iterator[list[StreamedModel]]:
    """Two resident targets, one streamed from SSD, a draft model, and a target as the oracle."""
    target, draft = pair
    opened = [
        open_float32(target, None),
        open_float32(target, None),
        open_float32(target, "ssd"),
        open_float32(draft, None),
        open_float32(target, None),
    ]
    yield opened
    for model in opened:
        model.close()


def assert_cache_is_a_fresh_prefill(cached: CachedModel) -> None:
    fresh = cached.model.new_cache()
    assert cached.cache.length == len(cached.tokens)
    if not cached.tokens:
        return
    cached.model.forward(PassRows.chain(cached.tokens, 0), fresh, [])
    for ours, expected in zip(cached.cache.layers, fresh.layers, strict=True):
        assert ours.length == expected.length == len(cached.tokens)
        for name in ("keys", "values"):
            torch.testing.assert_close(
                getattr(ours, name)[:, :, : ours.length],
                getattr(expected, name)[:, :, : expected.length],
                rtol=0,
                atol=2e-5,
            )


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("lookahead", [1, 3, 8])
def test_dsi_text_is_the_plain_text_and_caches_survive_it(models, temperature, lookahead):
    """Several texts in one pool, some ended early; then every cache against a fresh prefill."""
    targets = [ModelTarget(model) for model in models[:3]]
    drafter = ModelDrafter(models[3], vocab_size=models[0].vocab_size)
    oracle = LocalTarget(models[4])
    workers = ThreadWorkers(drafter, targets)
    try:
        orchestrator = Orchestrator(workers, DsiConfig(lookahead=lookahead))
        for seed in (1, 2):
            sampling = SamplingConfig(temperature=temperature, seed=seed)
            workers.configure(sampling)
            oracle.crop(0)
            steps = autoregressive(oracle, Sampler(sampling), PROMPT, 20, ())
            expected = [token for step in steps for token in step.tokens]
            early = orchestrator.generate(PROMPT, 20)
            begun = next(early).tokens
            assert list(begun) == expected[: len(begun)]
            early.close()
            commits = list(orchestrator.generate(PROMPT, 20))
            assert [t for c in commits for t in c.tokens] == expected
    finally:
        workers.close()
    for target in targets:
        assert_cache_is_a_fresh_prefill(target.cached)
    assert_cache_is_a_fresh_prefill(drafter.cached)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_perfect_drafter_guesses_every_token_sampled_ones_too(models, temperature):
    """The equality above would also hold if no draft were ever right."""
    sampling = SamplingConfig(temperature=temperature, seed=7)
    oracle = LocalTarget(models[4])
    steps = autoregressive(oracle, Sampler(sampling), PROMPT, 12, ())
    expected = [token for step in steps for token in step.tokens]
    drafter = ModelDrafter(models[1], vocab_size=models[1].vocab_size)
    drafter.configure(sampling)
    for known in (0, 5):  # from the prompt, and from a correction in the middle
        drafter.start([*PROMPT, *expected[:known]])
        assert [drafter.next_token() for _ in range(12 - known)] == expected[known:]


@pytest.mark.parametrize("which", [0, 2], ids=["resident", "streamed"])
def test_random_epochs_leave_the_cache_right(models, which):
    """Random prefixes, and passes that turn stale before a random layer."""
    numbers, cached = random.Random(which), CachedModel(models[which])
    text = [numbers.randrange(4, 200) for _ in range(40)]
    given_up = 0
    for _ in range(30):
        tokens = text[: numbers.randrange(4, 40)] + [numbers.randrange(4, 200) for _ in range(3)]
        first = numbers.randrange(1, len(tokens) + 1)
        polls = iter([False] * numbers.randrange(1, 8) + [True] * 9)
        logits = cached.logits(tokens, first, lambda polls=polls: next(polls))
        if logits is None:
            given_up += 1
        else:
            expected = chain_logits(models[which], tokens)[first - 1 :]
            torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
        assert_cache_is_a_fresh_prefill(cached)
    assert 0 < given_up < 30


def test_draws_end_at_the_first_that_differs(models):
    target = ModelTarget(models[0])
    draws = target.verify([*PROMPT, 5, 5, 5, 5], len(PROMPT), lambda: False)
    assert draws is not None
    assert len(draws) == 1, "a random draft is wrong at once"
    right = target.verify([*PROMPT, draws[0], 5], len(PROMPT), lambda: False)
    assert right is not None
    assert right[0] == draws[0]
    assert len(right) == 2


def test_a_prefill_draws_nothing_and_costs_later_tasks_nothing(models):
    target = ModelTarget(models[0])
    assert target.verify(PROMPT, len(PROMPT) + 1, lambda: False) == ()
    assert target.cached.tokens == PROMPT
    ran: list[int] = []
    forward = models[0].forward
    models[0].forward = lambda rows, *rest: ran.append(len(rows.tokens)) or forward(rows, *rest)
    try:
        target.verify(PROMPT, len(PROMPT) + 1, lambda: False)
        target.verify([*PROMPT, 7], len(PROMPT) + 1, lambda: False)
    finally:
        del models[0].forward
    assert ran == [1]
    assert target.verify([*PROMPT, 9], len(PROMPT) + 2, lambda: True) is None


def test_latencies_are_measured_and_leave_an_empty_cache(models):
    target = ModelTarget(models[0])
    ready = target.ready()
    seconds = ready.pass_s
    assert ready.context_length == 4096
    assert set(seconds) == {1, 32}
    assert all(value > 0 for value in seconds.values())
    assert target.cached.tokens == []
    assert target.cached.cache.length == 0
