"""Every KV cache after a rollback equals that of a fresh prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import (
    architecture,
    assert_fresh,
    open_float32,
    random_tokens,
    random_tree,
    save_checkpoint,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import kernels_of_a_gpu
from specexec_kernels import dispatch, triton_compact_kv

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.models.kv_cache import SlotCache, SlotLayer
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
        assert_fresh(model, target.state, target.tokens)
    target.crop(6)  # a new prompt that shares six tokens
    assert_fresh(model, target.state, context[:6])
    context = [*context[:6], *random_tokens(9, seed=7)]
    for seed in range(5, 7):
        iterate(target, context, rng, seed)
    assert_fresh(model, target.state, target.tokens)


def test_a_path_that_lies_in_its_place_is_not_moved(
    model: StreamedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a chain's does, whose drafts are accepted from the first on."""
    target, context, drafts = LocalTarget(model), random_tokens(9), random_tokens(5, seed=3)
    monkeypatch.setattr(dispatch, "compact_kv", pytest.fail)
    target.verify(context, DraftTree.chain(drafts))
    target.commit(range(3))
    assert target.tokens == [*context, *drafts[:3]]
    assert_fresh(model, target.state, target.tokens)


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
    assert_fresh(model, target.state, target.tokens)
    iterate(target, context, rng, 3)
    assert_fresh(model, target.state, target.tokens)


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
        assert drafter.rows.tokens == context[: len(drafter.rows.tokens)]
        assert_fresh(model, drafter.rows.state, drafter.rows.tokens)
    drafter.grow(random_tokens(8, seed=9), 5)  # another prompt altogether
    drafter.commit([], [3])
    assert_fresh(model, drafter.rows.state, random_tokens(8, seed=9))


def test_compaction_by_the_kernel_of_a_gpu(
    model: StreamedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    moved: list[int] = []
    kernel = triton_compact_kv.compact_kv

    def counted(keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, start: int) -> None:
        moved.append(len(kept))
        kernel(keys, values, kept, start)

    kernels_of_a_gpu(monkeypatch)
    monkeypatch.setattr(triton_compact_kv, "compact_kv", counted)
    target, rng, context = LocalTarget(model), np.random.default_rng(0), random_tokens(11)
    for seed in range(3):
        iterate(target, context, rng, seed)
        assert_fresh(model, target.state, target.tokens)
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
    assert_fresh(model, drafter.rows.state, drafter.rows.tokens)


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
            cache.commit(prefix, kept)
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


SHORTAGES = [torch.OutOfMemoryError, RuntimeError, MemoryError, KeyboardInterrupt]


def failing_buffers(at: int, error: type[BaseException]) -> Callable[..., torch.Tensor]:
    """In the place of SlotLayer._buffer: the allocation number `at`, from 0, fails."""
    make, made = SlotLayer._buffer, 0

    def buffer(layer: SlotLayer, like: torch.Tensor, capacity: int) -> torch.Tensor:
        nonlocal made
        made += 1
        if made == at + 1:
            raise error
        return make(layer, like, capacity)

    return buffer


def numbered(first: int, stop: int) -> torch.Tensor:
    """Rows that are all different, (1, 2, stop - first, 3)."""
    rows = torch.arange(first, stop, dtype=torch.float32)
    return rows.view(1, 1, -1, 1) + torch.arange(6.0).view(1, 2, 1, 3) / 8


@pytest.mark.parametrize("error", SHORTAGES)
@pytest.mark.parametrize("at", [0, 1])
def test_growth_that_fails_changes_nothing(
    at: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = SlotLayer()
    layer.update(numbered(0, 9), -numbered(0, 9))
    before = layer.keys, layer.values
    capacity = layer.keys.shape[2]
    more = numbered(9, capacity + 1)
    with monkeypatch.context() as patch:
        patch.setattr(SlotLayer, "_buffer", failing_buffers(at, error))
        with pytest.raises(error):
            layer.update(more, -more)
    assert (layer.keys, layer.values) == before
    assert layer.length == 9
    keys, values = layer.update(more, -more)
    assert torch.equal(keys, numbered(0, capacity + 1))
    assert torch.equal(values, -keys)


@pytest.mark.parametrize("error", SHORTAGES)
@pytest.mark.parametrize("at", range(6))
def test_layers_that_cannot_all_grow_are_all_empty(
    at: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = SlotCache(3)
    for layer in cache.layers:
        layer.update(numbered(0, 9), -numbered(0, 9))
    cache.grow_zeroed(16)
    with monkeypatch.context() as patch:
        patch.setattr(SlotLayer, "_buffer", failing_buffers(at, error))
        with pytest.raises(error):
            cache.grow_zeroed(32)
    assert (cache.length, cache.nbytes, cache.zeroed_capacity) == (0, 0, 0)
    assert not cache.is_initialized
    for layer in cache.layers:
        keys, _ = layer.update(numbered(0, 5), -numbered(0, 5))
        assert torch.equal(keys, numbered(0, 5))
    cache.grow_zeroed(cache.zeroed_capacity_for(6, at_least=4))
    assert {layer.keys.shape[2] for layer in cache.layers} == {6}


def test_growth_ends_at_what_was_planned() -> None:
    """2048 slots are followed by 2560, and at last by the 4354 that memory is planned for."""
    cache = SlotCache(1)
    cache.planned_slots = 4354
    for needed, expected in ((1, 2048), (2049, 2560), (4097, 4354), (4355, 5378)):
        cache.zeroed_capacity = cache.zeroed_capacity_for(needed, at_least=2048)
        assert cache.zeroed_capacity == expected
    assert cache.zeroed_capacity_for(1, at_least=2048) == 5378, "it never shrinks"
    small = SlotCache(1)
    small.planned_slots = 300
    assert small.zeroed_capacity_for(20, at_least=2048) == 300


def test_zeroed_slots_are_zero_and_keep_what_was_filled() -> None:
    cache = SlotCache(2)
    for layer in cache.layers:
        layer.update(numbered(0, 5), -numbered(0, 5))
    for capacity in (8, 16):
        assert cache.zeroed_capacity_for(capacity - 1, at_least=8) == capacity
        cache.grow_zeroed(capacity)
        for layer in cache.layers:
            assert torch.equal(layer.keys[:, :, :5], numbered(0, 5))
            assert layer.keys.shape == layer.values.shape == (1, 2, capacity, 3)
            assert not layer.keys[:, :, 5:].any()
            assert not layer.values[:, :, 5:].any()
    assert cache.zeroed_capacity_for(1, at_least=8) == 16, "it never shrinks"


def test_rows_that_are_dropped_hide_no_nan_from_steps_that_read_them() -> None:
    cache = SlotCache(2)
    fill(cache, 0, 9)
    cache.let_steps_read()
    fill(cache, 9, 12)
    for layer in cache.layers:
        layer.keys[:, :, 7:12] = layer.values[:, :, 7:12] = torch.nan
        layer.keys[:, :, 9] = layer.values[:, :, 9] = 9.0
    cache.commit(7, [9])
    cache.crop(6)
    for layer in cache.layers:
        assert torch.equal(layer.keys[:, :, :6], numbered(0, 6))
        assert not layer.keys[:, :, 6:].any()
        assert not layer.values[:, :, 6:].any()


def test_buffers_that_steps_read_move_seldom_and_all_together() -> None:
    cache = SlotCache(2)
    fill(cache, 0, 5)
    cache.reserve(300)
    cache.planned_slots = 2600
    cache.let_steps_read()
    assert {layer.keys.shape[2] for layer in cache.layers} == {2048}
    sizes = []
    for slots in range(400, 2601, 100):
        cache.reserve(slots)
        sizes += {layer.keys.shape[2] for layer in cache.layers}
        assert not any(layer.keys[:, :, 5:].any() for layer in cache.layers)
    assert sorted(set(sizes)) == [2048, 2560, 2600]
    assert {layer.moves for layer in cache.layers} == {4}  # the first pass's growth among them


def test_an_interrupted_step_leaves_no_slots_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(SlotLayer):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "write_slots" and value is not None:
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    cache = SlotCache(2)
    cache.layers[1] = Layer()
    with pytest.raises(KeyboardInterrupt), cache.writing_to(torch.tensor([0])):
        pass
    assert [layer.write_slots for layer in cache.layers] == [None, None]


def fill(cache: SlotCache, first: int, stop: int) -> None:
    """A pass over rows first..stop."""
    for layer in cache.layers:
        layer.update(numbered(first, stop), -numbered(first, stop))


def test_an_unreserved_cache_grows_by_256_slots() -> None:
    cache = SlotCache(2)
    fill(cache, 0, 1)
    assert cache.capacity == 256
    buffers = cache.layers[0].keys.data_ptr()
    fill(cache, 1, 256)
    assert cache.layers[0].keys.data_ptr() == buffers, "256 rows fill it, and need no more"
    fill(cache, 256, 257)
    assert cache.capacity == 512
    fill(cache, 257, 957)
    assert cache.capacity == 1024
    for layer in cache.layers:
        assert torch.equal(layer.keys[:, :, :957], numbered(0, 957))
        assert torch.equal(layer.values[:, :, :957], -numbered(0, 957))


def test_a_reservation_counts_from_the_next_growth_on() -> None:
    cache = SlotCache(1)
    fill(cache, 0, 2)
    cache.reserve(700)
    assert cache.capacity == 256
    fill(cache, 2, 257)
    assert cache.capacity == 700
    fill(cache, 257, 757)
    assert cache.capacity == 768, "more than was reserved"


@pytest.mark.parametrize("layers", [1, 3])
def test_bytes_are_those_of_keys_and_values(layers: int) -> None:
    cache = SlotCache(layers)
    assert cache.nbytes == 0
    fill(cache, 0, 4)
    assert cache.nbytes == layers * 2 * (2 * 256 * 3) * 4


@pytest.mark.parametrize(
    ("slots", "from_32", "from_40"), [(1, 32, 40), (32, 32, 40), (33, 40, 40), (41, 48, 48),
                                      (64, 64, 64), (65, 80, 80), (200, 224, 224), (256, 256, 256)]
)  # fmt: skip
def test_zeroed_capacities_double_in_four_steps(slots: int, from_32: int, from_40: int) -> None:
    cache = SlotCache(1)
    assert cache.zeroed_capacity_for(slots, at_least=32) == from_32
    fill(cache, 0, 1)
    cache.grow_zeroed(40)
    assert cache.zeroed_capacity_for(slots, at_least=32) == from_40
    assert cache.zeroed_capacity_for(1, at_least=90) == 90
    assert cache.zeroed_capacity_for(91, at_least=90) == 113
    assert cache.zeroed_capacity_for(180, at_least=90) == 180, "no more than by doubling"


def test_rows_written_to_named_slots() -> None:
    cache = SlotCache(2)
    fill(cache, 1, 4)
    cache.grow_zeroed(8)
    with cache.writing_to(torch.tensor([4, 7])):
        for layer in cache.layers:
            keys, values = layer.update(numbered(50, 52), -numbered(50, 52))
            assert keys.shape == values.shape == (1, 2, 8, 3), "every slot is handed to attention"
            assert keys[0, 0, :, 0].tolist() == [1, 2, 3, 0, 50, 0, 0, 51]
            assert torch.equal(values, -keys)
    assert [layer.length for layer in cache.layers] == [3, 3], "advance tells what they filled"
    cache.advance(2)
    assert [layer.length for layer in cache.layers] == [5, 5]
    fill(cache, 90, 91)
    assert cache.layers[1].keys[0, 0, :, 0].tolist() == [1, 2, 3, 0, 50, 90, 0, 51]


def test_what_transformers_asks_of_a_cache() -> None:
    cache = SlotCache(2)
    fill(cache, 0, 6)
    assert cache.get_seq_length() == 6
    assert cache.get_mask_sizes(4, 0) == (10, 0)
    assert cache.layers[0].get_max_length() == -1, "as many slots as are needed"


def test_layers_that_an_aborted_pass_left_ahead_are_cropped_alike() -> None:
    cache = SlotCache(3)
    fill(cache, 0, 6)
    cache.layers[0].update(numbered(6, 10), numbered(6, 10))
    assert cache.length == 6
    assert cache.crop(8) == 6
    assert [layer.length for layer in cache.layers] == [6, 6, 6]
    cache.commit(2, [])
    assert [layer.length for layer in cache.layers] == [2, 2, 2]
