"""Every KV cache after a rollback equals that of a fresh prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import architecture, open_float32, random_tokens, random_tree, save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from specexec_kernels import dispatch, triton_compact_kv

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.models.kv_cache import SlotCache
from specexec_cli.models.rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget

NAMES = ["llama", "mistral", "qwen3-moe", "gemma3", "gpt-bigcode"]
TREE = TreeConfig(budget=14, max_depth=5, batch=3)


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[StreamedModel]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, architecture(request.param))
    model = open_float32(folder)
    yield model
    model.close()


def assert_fresh(model: StreamedModel, cache: SlotCache, tokens: list[int]) -> None:
    """The cache holds exactly the rows a prefill of `tokens` would write."""
    assert cache.length == len(tokens)
    fresh = model.new_cache()
    if tokens:
        model.forward(PassRows.chain(tokens, 0), fresh, [])
    for ours, expected in zip(cache.layers, fresh.layers, strict=True):
        assert ours.length == len(tokens)
        for part in ("keys", "values"):
            if tokens:
                torch.testing.assert_close(
                    getattr(ours, part)[:, :, : len(tokens)],
                    getattr(expected, part)[:, :, : len(tokens)],
                    rtol=0,
                    atol=5e-5,
                )


def random_path(tree: DraftTree, rng: np.random.Generator) -> list[int]:
    """A path from the root, of any length down to none."""
    path, node = [], -1
    while rng.random() < 0.8:
        children = np.flatnonzero(tree.parents == node)
        if len(children) == 0:
            break
        node = int(rng.choice(children))
        path.append(node)
    return path


def iterate(target: LocalTarget, context: list[int], rng: np.random.Generator, seed: int) -> None:
    """One verification with a random tree and a random accepted path; extends the context."""
    tree = random_tree(int(rng.integers(0, 15)), seed)
    target.verify(context[len(target.tokens) :], tree)
    path = random_path(tree, rng)
    target.commit(path)
    context += [*tree.tokens[path].tolist(), int(rng.integers(0, 64))]


@pytest.mark.parametrize("reserve", [0, 100])
def test_the_target_s_cache(model: StreamedModel, reserve: int) -> None:
    target, rng, context = LocalTarget(model), np.random.default_rng(0), random_tokens(11)
    target.reserve(reserve)
    for seed in range(5):
        iterate(target, context, rng, seed)
        assert target.tokens == context[: len(target.tokens)]
        assert len(target.tokens) == len(context) - 1, "all but the bonus token"
        assert_fresh(model, target._cache, target.tokens)
    target.crop(6)  # a new prompt that shares six tokens
    assert_fresh(model, target._cache, context[:6])
    context = [*context[:6], *random_tokens(9, seed=7)]
    for seed in range(5, 7):
        iterate(target, context, rng, seed)
    assert_fresh(model, target._cache, target.tokens)


def failing_at(layer: int, error: type[BaseException]) -> Callable[[int], None]:
    def on_layer(index: int) -> None:
        if index == layer:
            raise error("stop here")

    return on_layer


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_target_s_cache_after_an_aborted_pass(
    model: StreamedModel, layer: int, error: type[BaseException]
) -> None:
    target, rng, context = LocalTarget(model), np.random.default_rng(1), random_tokens(11)
    iterate(target, context, rng, 1)
    model.on_layer = failing_at(layer, error)
    with pytest.raises(error):
        target.verify(context[len(target.tokens) :], random_tree(9, 2))
    model.on_layer = lambda index: None
    assert_fresh(model, target._cache, target.tokens)
    iterate(target, context, rng, 3)
    assert_fresh(model, target._cache, target.tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_draft_model_s_cache(model: StreamedModel, temperature: float) -> None:
    rng, context = np.random.default_rng(2), random_tokens(11)
    sampler = Sampler(SamplingConfig(temperature=temperature))
    drafter = ModelDrafter(model, sampler, TREE, model.vocab_size)
    for _ in range(4):
        tree = drafter.grow(context, 5)
        assert len(tree) == 14
        path = random_path(tree, rng)
        tokens = [*tree.tokens[path].tolist(), int(rng.integers(0, 64))]
        drafter.commit(path, tokens)
        context += tokens
        assert drafter.tokens == context[: len(drafter.tokens)]
        assert_fresh(model, drafter._cache, drafter.tokens)
    drafter.grow(random_tokens(8, seed=9), 5)  # another prompt altogether
    drafter.commit([], [3])
    assert_fresh(model, drafter._cache, random_tokens(8, seed=9))


def test_compaction_by_the_kernel_of_a_gpu(
    model: StreamedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    moved: list[int] = []
    kernel = triton_compact_kv.compact_kv

    def counted(cache: torch.Tensor, kept: torch.Tensor, start: int) -> None:
        moved.append(len(kept))
        kernel(cache, kept, start)

    monkeypatch.setattr(dispatch, "uses_triton", lambda device: True)
    monkeypatch.setattr(triton_compact_kv, "compact_kv", counted)
    target, rng, context = LocalTarget(model), np.random.default_rng(0), random_tokens(11)
    for seed in range(3):
        iterate(target, context, rng, seed)
        assert_fresh(model, target._cache, target.tokens)
    assert max(moved) > 1


@pytest.mark.parametrize("failing_pass", [0, 1, 2])
def test_the_draft_model_s_cache_after_an_aborted_search(
    model: StreamedModel, failing_pass: int
) -> None:
    context = random_tokens(11)
    drafter = ModelDrafter(model, Sampler(SamplingConfig()), TREE, model.vocab_size)
    passes = 0

    def on_layer(index: int) -> None:
        nonlocal passes
        passes += index == 1
        if passes > failing_pass and index == 1:
            raise KeyboardInterrupt

    model.on_layer = on_layer
    with pytest.raises(KeyboardInterrupt):
        drafter.grow(context, 5)
    model.on_layer = lambda index: None
    assert model.source is not None
    model.source.restart()  # a resident draft model has no source that could be out of step
    fresh = ModelDrafter(model, Sampler(SamplingConfig()), TREE, model.vocab_size)
    again, expected = drafter.grow(context, 5), fresh.grow(context, 5)
    assert again.tokens.tolist() == expected.tokens.tolist()
    assert again.parents.tolist() == expected.parents.tolist()
    drafter.commit([0], [int(again.tokens[0]), 1])
    assert_fresh(model, drafter._cache, drafter.tokens)


@settings(max_examples=150, deadline=None)
@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 9)),
            st.tuples(st.just("crop"), st.integers(0, 30)),
            st.tuples(st.just("compact"), st.integers(0, 30), st.sets(st.integers(0, 40))),
            st.tuples(st.just("reserve"), st.integers(0, 60)),
        ),
        max_size=12,
    )
)
def test_slots_move_as_in_a_list(operations):
    """Against a plain list of rows, whatever the order of operations."""
    cache, rows, counter = SlotCache(2), [], 0
    for name, *values in operations:
        if name == "append":
            new = list(range(counter, counter + values[0]))
            counter += values[0]
            rows += new
            states = torch.tensor(new, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, -1, 3)
            for layer in cache.layers:
                keys, mirrored = layer.update(states, -states)
                assert keys.shape == mirrored.shape == (1, 2, len(rows), 3)
        elif name == "crop":
            cache.crop(values[0])
            del rows[values[0] :]
        elif name == "compact":
            prefix = min(values[0], len(rows))
            kept = sorted(slot for slot in values[1] if prefix <= slot < len(rows))
            cache.compact(prefix, kept)
            rows[prefix:] = [rows[slot] for slot in kept]
        else:
            cache.reserve(values[0])
        assert cache.length == len(rows)
        for layer in cache.layers:
            if rows:
                assert layer.keys[0, 0, : len(rows), 0].tolist() == rows
                assert layer.values[0, 1, : len(rows), 2].tolist() == [-row for row in rows]


def test_reserved_slots_are_allocated_once():
    cache = SlotCache(1)
    cache.reserve(50)
    states = torch.zeros(1, 1, 10, 4)
    cache.layers[0].update(states, states)
    first = cache.layers[0].keys.data_ptr()
    for _ in range(4):
        cache.layers[0].update(states, states)
    assert cache.layers[0].keys.data_ptr() == first
    assert cache.nbytes == 2 * cache.layers[0].keys.shape[2] * 4 * 4
