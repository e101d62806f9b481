"""Real (tiny) models behind the workers: the text of plain decoding, and caches always right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import (
    byte_llama,
    chain_logits,
    open_float32,
    save_checkpoint,
    save_pair,
    spoil_logits,
)
from dsi_toys import ToyDrafter
from gguf_toys import TOYS, save_toy
from safetensors.torch import load_file, save_file
from thread_workers import ThreadWorkers

from specexec_cli.config import SamplingConfig
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.dsi import engine
from specexec_cli.dsi.engine import CachedModel, KeptAs, ModelDrafter, ModelTarget
from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.errors import NonFiniteLogitsError
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.prefixes.folder import kept_prefixes
from specexec_cli.sampling import Sampler
from specexec_cli.verify.rejection import settle
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
    fresh = cached.model.new_state()
    assert cached.state.length == len(cached.tokens)
    if not cached.tokens:
        return
    cached.model.forward(PassRows.chain(cached.tokens, 0), fresh, [])
    for ours, expected in zip(cached.state.layers, fresh.layers, strict=True):
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


@pytest.mark.parametrize("same", [True, False])
def test_drafts_are_tested_by_rejection_sampling(models, same):
    """A drafter that is the target keeps every draft; of any drafts the tests are settle()'s."""
    sampling, first = SamplingConfig(temperature=1.0, top_k=5, seed=7), len(PROMPT)
    target, vocab_size = ModelTarget(models[0]), models[0].vocab_size
    target.configure(sampling, rejection=True)
    if same:
        drafter = ModelDrafter(models[1], vocab_size=vocab_size)
        drafter.configure(sampling, rejection=True)
        drafter.start(PROMPT)
        drawn = [(drafter.next_token(), drafter.proposal) for _ in range(8)]
    else:
        numbers = random.Random(0)
        uniform = np.full(vocab_size, 1 / vocab_size, dtype=np.float32)
        drawn = [(numbers.randrange(vocab_size), uniform) for _ in range(8)]
    text = [*PROMPT, *(token for token, _ in drawn)]
    draws = target.verify(text, first, lambda: False, [proposal for _, proposal in drawn])
    probs = [
        Sampler(sampling).probs(row, text[:position])
        for position, row in enumerate(chain_logits(models[0], text), 1)
    ]
    for position, (found, (draft, proposal)) in enumerate(zip(draws, drawn, strict=False), first):
        token, kept = settle(probs[position - 1], proposal, (draft,), 7, position)
        assert found == token
        assert (found == draft) == (kept is not None)
    if same:
        assert list(draws) == text[first:]
        assert target.bonus == pytest.approx(probs[-1], abs=1e-5)
    else:
        assert len(draws) < 8, "top-k excludes most uniform drafts"
        assert list(draws[:-1]) == text[first : first + len(draws) - 1]
        assert target.bonus is None


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
    assert target.cached.state.length == 0


def test_a_draft_model_at_the_edges_of_what_it_knows(tmp_path: Path) -> None:
    """A short window, a small vocabulary, logits that are not finite: no draft, and no failure."""
    save_checkpoint(tmp_path, byte_llama(num_hidden_layers=1, max_position_embeddings=12))
    spoil_logits(tmp_path, 7)
    with closing(open_float32(tmp_path, None)) as model:
        drafter = ModelDrafter(model, vocab_size=320)
        ready = drafter.ready()
        assert ready.context_length == 12
        assert set(ready.pass_s) == {1, 12}
        drafter.start([20, 300, 21, 319])  # 260 tokens are known
        drafted = [drafter.next_token() for _ in range(8)]
        assert all(token is not None and token < 260 for token in drafted)
        assert drafter.next_token() is None, "the window is full"
        drafter.start([20] * 13)
        assert drafter.next_token() is None
        drafter.start([20, 7])
        assert drafter.next_token() is None
        drafter.start([20, 7, 21])
        assert drafter.next_token() is not None
        drafter.start([20, 0, 21, 0])
        assert [drafter.next_token() for _ in range(8)] == drafted, "id 0 stands in"


def test_draws_end_in_front_of_logits_that_are_not_finite(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, byte_llama(num_hidden_layers=2))
    spoil_logits(tmp_path, None)
    with closing(open_float32(tmp_path, None)) as model:
        oracle = LocalTarget(model)
        text = [*PROMPT]
        for step in autoregressive(oracle, Sampler(SamplingConfig()), PROMPT, 6, ()):
            text += step.tokens
    spoilt = next(at for at in range(len(PROMPT), len(text)) if text[at] not in text[:at])
    spoil_logits(tmp_path, text[spoilt])
    with closing(open_float32(tmp_path, None)) as model:
        target = ModelTarget(model)
        first = len(PROMPT)
        assert target.verify(text, first, lambda: False) == tuple(text[first : spoilt + 1])
        with pytest.raises(NonFiniteLogitsError, match=f"position {spoilt + 1}"):
            target.verify(text, spoilt + 1, lambda: False)
        assert target.verify(text[: first + 1], first, lambda: False) is not None
        assert_cache_is_a_fresh_prefill(target.cached)


class StubbornDrafter(ToyDrafter):
    """Proposes the same token everywhere."""

    def next_token(self) -> int:
        return 7


def test_a_draft_whose_values_are_not_finite_spoils_no_text(tmp_path: Path) -> None:
    """Its keys and values reach every row of a pass, those in front of it by 0 times NaN."""
    save_checkpoint(tmp_path, byte_llama(num_hidden_layers=2))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with closing(open_float32(tmp_path, None)) as model, closing(open_float32(tmp_path)) as other:
        steps = autoregressive(LocalTarget(model), Sampler(SamplingConfig()), PROMPT, 12, ())
        expected = [token for step in steps for token in step.tokens]
        workers = ThreadWorkers(StubbornDrafter(0, 1.0), [ModelTarget(model), ModelTarget(other)])
        try:
            orchestrator = Orchestrator(workers, DsiConfig(lookahead=3), pytest.fail)
            commits = list(orchestrator.generate(PROMPT, 12))
            assert [token for commit in commits for token in commit.tokens] == expected
        finally:
            workers.close()


def test_scores_and_forgetting(models) -> None:
    for server in (ModelTarget(models[0]), ModelDrafter(models[3], models[0].vocab_size)):
        server.cached.logits(PROMPT[:5], 5, lambda: False)
        scores = torch.from_numpy(server.score(PROMPT, 3))
        expected = chain_logits(server.cached.model, PROMPT)[2:-1]
        torch.testing.assert_close(scores, expected, rtol=0, atol=2e-4)
        assert_cache_is_a_fresh_prefill(server.cached)
        rows = server.cached.rows_run
        server.cached.logits(PROMPT, len(PROMPT), lambda: False)
        assert server.cached.rows_run == rows + 1
        server.forget()
        server.cached.logits(PROMPT, len(PROMPT), lambda: False)
        assert server.cached.rows_run == rows + 1 + len(PROMPT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workers_bring_back_what_one_of_them_kept(
    dtype: torch.dtype, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter and two target servers read the new alone; the text is the plain one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = ModelSpec(device=torch.device("cpu"), dtype=dtype, tiers=None)
    prompt = [4 + each % 250 for each in range(7, 300)]
    texts, rows = [], []
    for kept in (None, "rows", "rows"):
        opened = [spec.open(read_checkpoint(folder)) for folder in (pair[0], pair[0], pair[1])]
        named = [
            KeptAs(f"model {at == 2}", f"rows of {at == 2}", None, writes=at != 1) if kept else None
            for at in range(3)
        ]
        targets = [ModelTarget(model, as_) for model, as_ in zip(opened[:2], named, strict=False)]
        drafter = ModelDrafter(opened[2], opened[0].vocab_size, named[2])
        workers = ThreadWorkers(drafter, targets)
        try:
            workers.configure(SamplingConfig(temperature=0.8, seed=3), prompt=prompt)
            commits = Orchestrator(workers, DsiConfig(lookahead=3)).generate(prompt, 12)
            texts.append([token for commit in commits for token in commit.tokens])
            workers.end([*prompt, *texts[-1]])
        finally:
            workers.close()
        rows.append([each.cached.rows_run for each in (*targets, drafter)])
        for each in (*targets, drafter):
            each.close()
        for model in opened:
            model.close()
    assert texts[0] == texts[1] == texts[2]
    assert max(rows[0]) >= len(prompt)
    assert len(kept_prefixes()) == 2
    assert max(rows[2]) < 64 + 200, "the prompt but its last tokens, and drafts"
    assert sum(rows[0]) - sum(rows[2]) > len(prompt)


LONG = [3 + (each * each) % 45 for each in range(400)]
WRONG = [5] * 140


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_what_is_kept_of_a_text_ends_where_the_text_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last pass ran over drafts that were wrong; a recurrent state behind them is of no use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_toy(TOYS[name], tmp_path)
    spec = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers=None)
    with closing(spec.open(read_checkpoint(tmp_path))) as model:

        def read_by_another(text: list[int], stale=lambda: False) -> int:
            later = CachedModel(model, KeptAs("m", "rows of m", None, writes=False))
            later.logits(text, len(text), stale)
            later.close()
            return later.rows_run

        with closing(CachedModel(model, KeptAs("m", "rows of m", None, writes=True))) as cached:
            cached.begin_text(LONG[:200])
            cached.logits([*LONG[:200], *WRONG], 200, lambda: False)
            cached.logits([*LONG[:200], *WRONG, 6], 340, lambda: False)
            cached.logits([*LONG[:205], *LONG[205:300]], 201, lambda: False)
            cached.end_text(LONG[:297])
            assert list(cached.tokens) == LONG[:297]
        behind = 297 if name == "qwen3_5" else 256
        assert read_by_another(LONG) == len(LONG) - behind
        assert read_by_another([*LONG[:200], *WRONG, 6]) >= 140, "no draft was kept"
        looks = iter([False, True])
        assert read_by_another(LONG, lambda: next(looks, True)) == len(LONG)
        monkeypatch.setattr(engine, "MOST_READING_S", 0.0)
        assert read_by_another(LONG) == len(LONG), "what a slow disk has is computed"
