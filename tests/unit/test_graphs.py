"""Draft steps over static buffers say what plain passes say; on a GPU, so do their graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import architecture, random_tokens, save_checkpoint
from fake_cuda import fake_cuda

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.models import graphs
from specexec_cli.models.graphs import StepRunner
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.sampling import Sampler

TREE = TreeConfig(budget=24, max_depth=6, batch=5)
GRAPHS = ["llama", "mistral", "gemma2", "gemma3", "gpt-bigcode"]


def opened(folder: Path, device: str = "cpu") -> StreamedModel:
    """A draft model: loaded to stay."""
    return StreamedModel.open(folder, device=torch.device(device), dtype=torch.float32, tiers=None)


def drafter_of(model: StreamedModel, stepping: bool) -> ModelDrafter:
    drafter = ModelDrafter(model, Sampler(SamplingConfig()), TREE, model.vocab_size)
    if not stepping:
        drafter._steps = None
    elif model.device.type == "cpu":  # on a GPU that is the drafter's own choice
        drafter._steps = StepRunner(model, drafter._cache, capture=False)
    return drafter


def assert_same_trees(stepping: ModelDrafter, plain: ModelDrafter, rounds: int) -> None:
    """The same trees from the same accepted paths, prompt after prompt."""
    rng = np.random.default_rng(0)
    for prompt in (random_tokens(9), random_tokens(80, seed=3), random_tokens(1, seed=4)):
        context = list(prompt)
        for _ in range(rounds):
            ours, theirs = stepping.grow(context, 6), plain.grow(context, 6)
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert ours.parents.tolist() == theirs.parents.tolist()
            np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-4)
            path, node = [], -1
            for _ in range(int(rng.integers(0, 5))):
                children = np.flatnonzero(ours.parents == node)
                if len(children) == 0:
                    break
                node = int(rng.choice(children))
                path.append(node)
            tokens = [*ours.tokens[path].tolist(), int(rng.integers(0, 64))]
            for drafter in (stepping, plain):
                drafter.commit(path, tokens)
            context += tokens


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt-bigcode", "mixtral"])
def test_steps_draft_the_same_trees(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_CAPACITY", 32)  # buffers double on the way
    save_checkpoint(tmp_path, architecture(name))
    with_steps, without = opened(tmp_path), opened(tmp_path)
    stepping = drafter_of(with_steps, stepping=True)
    assert_same_trees(stepping, drafter_of(without, stepping=False), rounds=4)
    assert stepping._cache.capacity == 128
    assert stepping._steps is not None
    buckets = set(stepping._steps._steps)
    assert {1, 8} <= buckets, "a bonus token and a batch of five have buckets of their own"


def test_a_bucket_is_prepared_once_whatever_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[int] = []
    original = graphs._Step.__init__

    def counted(step: graphs._Step, model: StreamedModel, cache: object, bucket: int) -> None:
        prepared.append(bucket)
        original(step, model, cache, bucket)  # type: ignore[arg-type]

    monkeypatch.setattr(graphs._Step, "__init__", counted)
    save_checkpoint(tmp_path, architecture("llama"))
    model = opened(tmp_path)
    assert_same_trees(drafter_of(model, True), drafter_of(opened(tmp_path), False), rounds=4)
    assert sorted(prepared) == sorted(set(prepared))


def test_an_aborted_step_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    model = opened(tmp_path)
    stepping, plain = drafter_of(model, True), drafter_of(opened(tmp_path), False)
    context = random_tokens(9)
    stepping.grow(context, 6)

    def stop(index: int) -> None:
        raise KeyboardInterrupt

    model.on_layer = stop
    with pytest.raises(KeyboardInterrupt):
        stepping.grow([*context, 5], 6)
    model.on_layer = lambda index: None
    ours, theirs = stepping.grow([*context, 5], 6), plain.grow([*context, 5], 6)
    assert ours.tokens.tolist() == theirs.tokens.tolist()


def assert_graphs_draft_the_same_trees(folder: Path, rounds: int) -> None:
    stepping = drafter_of(opened(folder, "cuda"), stepping=True)
    assert stepping._steps is not None
    plain = drafter_of(opened(folder, "cuda"), stepping=False)
    assert_same_trees(stepping, plain, rounds)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_draft_the_same_trees(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture(name))
    assert_graphs_draft_the_same_trees(tmp_path, rounds=6)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_step_can_be_captured(name: str, tmp_path: Path) -> None:
    """Nothing in it waits for the device or reaches into ordinary memory."""
    save_checkpoint(tmp_path, architecture(name))
    with fake_cuda():
        assert_graphs_draft_the_same_trees(tmp_path, rounds=1)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_are_picked_by_python_so_no_graph_can_hold_them(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture(name))
    with fake_cuda():
        drafter = drafter_of(opened(tmp_path, "cuda"), stepping=True)
        assert drafter._steps is None
        assert len(drafter.grow(random_tokens(9), 6)) == TREE.budget
