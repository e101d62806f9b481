"""Passes that a GPU replays have the bits of passes that it is told kernel by kernel.

Here by the stand-in, and with `-m gpu` by a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    ARCHITECTURES,
    architecture,
    byte_llama,
    random_tokens,
    save_checkpoint,
    save_pair,
)
from conformance_configs import tiny_config
from fake_cuda import counted, fake_cuda
from specexec_kernels import dispatch

from specexec_cli.config import GenerationConfig, SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.models import kv_cache
from specexec_cli.models.kv_cache import SlotCache
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession
from specexec_cli.verify.verifier import LocalTarget

NAMES = ["llama", "mistral", "gemma2", "gemma3", "gpt-bigcode", "qwen3-moe"]
# of types by their tiny configurations: windows, chunks, and keys that layers share
TINY = ["llama4_text", "gemma4_text", "qwen3", "glm4", "cohere2", "olmo2"]
# known not to be captured: experts of one tensor; found out: choices that the host reads, and
# thresholds that it sends
KNOWN, FOUND_OUT = ["gpt-oss"], ["dbrx", "gemma3n_text"]


@contextmanager
def resident(
    folder: Path,
    name: str,
    *,
    real: bool = False,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
) -> Iterator[StreamedModel]:
    """A target whose layers stay on the device, as their file has them; embeddings are in RAM.

    Args:
        layers: of those that tests/checkpoints.py has; each interpreted kernel takes its time.
    """
    config = architecture(name) if name in ARCHITECTURES else tiny_config(name)
    if name in ARCHITECTURES:
        config.num_hidden_layers = layers
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = kinds[:layers]
    save_checkpoint(folder, config)
    with nullcontext() if real else fake_cuda(triton=True):
        tiers = ("resident",) * config.num_hidden_layers
        spec = ModelSpec(device=torch.device("cuda"), dtype=dtype, tiers=tiers)
        model = spec.open(read_checkpoint(folder))
        try:
            yield model
        finally:
            model.close()


def passes(target: LocalTarget) -> Iterator[torch.Tensor]:
    """Of a prompt, a tree whose paths lie apart, a token, and both at once."""
    yield target.verify(random_tokens(5), DraftTree.empty())
    target.commit([])
    tree = DraftTree(np.arange(4), np.array([-1, -1, 0, 2]), np.array([1, 1, 2, 3]), np.zeros(4))
    yield target.verify([5], tree)
    target.commit([0, 2])
    yield target.verify([7], DraftTree.empty())
    target.commit([])
    yield target.verify([6, 1], tree)


def assert_alike(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def kinds(name: str) -> tuple[int, int]:
    """How many kinds of passes are recorded, and how many notices told."""
    return (0, int(name in FOUND_OUT)) if name in KNOWN + FOUND_OUT else (2, 0)


def of_both(
    model: StreamedModel, recorded: int = 2, notices: int = 0
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """The logits of replayed passes, of which so many kinds have been recorded, and of others."""
    told: list[str] = []
    replayed, plain = LocalTarget(model, replays=True, notice=told.append), LocalTarget(model)
    assert replayed.steps is not None
    found = [logits.cpu() for logits in passes(replayed)]
    assert len(replayed.steps.prepared) == recorded, replayed.steps.obstacle
    assert bool(replayed.steps.obstacle) == (recorded == 0)
    assert len(told) == notices, told
    assert "\n" not in "".join(told)
    return found, [logits.cpu() for logits in passes(plain)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe", "llama4_text", "dbrx"])
def test_a_replayed_pass_says_what_any_other_says(name: str, tmp_path: Path) -> None:
    """But for bits: PyTorch on a CPU rounds elements at a tensor's end in another way."""
    with resident(tmp_path, name) as model:
        assert_alike(*of_both(model, *kinds(name)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", [*NAMES, *TINY, *KNOWN, *FOUND_OUT])
def test_a_gpu_replays_the_bits_of_any_other_pass(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    with resident(tmp_path, name, real=True, dtype=dtype) as model:
        found, expected = of_both(model, *kinds(name))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_passes_of_few_rows_are_replayed_and_wait_for_nothing(tmp_path: Path) -> None:
    with resident(tmp_path, "llama") as model:
        target = LocalTarget(model, replays=True)
        assert target.steps is not None
        list(passes(target))
        assert set(target.steps.prepared) == {(1, 0, 0), (16, 32, 1024)}
        target.crop(5)
        for _ in range(2):
            with counted() as counts:
                target.verify([7], DraftTree.empty())
            target.commit([])
        assert (counts.waits, counts.kernels) == (0, 0)
        assert counts.operations <= 2


def test_passes_are_recorded_again_where_the_cache_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_GROWTH_SLOTS", 16)
    with resident(tmp_path, "llama", layers=1) as model:
        replayed, plain = LocalTarget(model, replays=True), LocalTarget(model)
        for target in (replayed, plain):
            target.verify(random_tokens(13), DraftTree.empty())
            target.commit([])
        found: tuple[list[torch.Tensor], ...] = [], []
        for token in range(1, 6):
            for target, logits in zip((replayed, plain), found, strict=True):
                logits.append(target.verify([token], DraftTree.empty()).cpu())
                target.commit([])
        assert_alike(*found)
        assert isinstance(replayed.state, SlotCache)
        assert replayed.state.capacity == 32


@pytest.mark.parametrize("run", [1, 2])
def test_without_memory_passes_go_on_as_they_are(
    run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may have taken what was planned: it runs out in a layer of the warm-up, or
    of the recording."""
    attend, runs = dispatch.tree_attention, 0

    def lacking(*args: Any) -> torch.Tensor:
        nonlocal runs
        recorded = args[0].shape[0] == 16  # rows of a tree and padding rows
        runs += recorded
        if recorded and runs == 2 * run:  # in the second layer of two
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n20.00 MiB.")
        return attend(*args)

    with resident(tmp_path, "llama") as model, monkeypatch.context() as patch:
        patch.setattr(dispatch, "tree_attention", lacking)
        assert_alike(*of_both(model, 0, notices=1))


def test_an_interrupted_recording_leaves_the_text_as_it_was(tmp_path: Path) -> None:
    with resident(tmp_path, "llama") as model:
        replayed, plain = LocalTarget(model, replays=True), LocalTarget(model)
        for target in (replayed, plain):
            target.verify(random_tokens(9), DraftTree.empty())
            target.commit([])

        def stop(index: int) -> None:
            raise KeyboardInterrupt

        model.on_layer = stop
        with pytest.raises(KeyboardInterrupt):
            replayed.verify([5], DraftTree.empty())
        model.on_layer = lambda index: None
        ours, theirs = (target.verify([5], DraftTree.empty()) for target in (replayed, plain))
        assert_alike([ours.cpu()], [theirs.cpu()])


def test_a_session_replays_passes_where_its_plan_has_room(tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path, target=byte_llama(num_hidden_layers=1))
    found = []
    for device in ("cpu", "cuda"):
        with (
            nullcontext() if device == "cpu" else fake_cuda(triton=True, replays=True),
            Session.open(
                model=str(target), method="autoregressive", device=device, dtype="float32"
            ) as session,
        ):
            assert isinstance(session, LocalSession)
            steps = session.generate(
                "def f", tree=TreeConfig(budget=1, max_depth=1), sampling=SamplingConfig(),
                generation=GenerationConfig(max_tokens=4),
            )  # fmt: skip
            found.append([token for step in steps for token in step.tokens])
            if device == "cuda":
                assert session.decision.plan.replays
                assert session.target.steps is not None
                assert set(session.target.steps.prepared) == {(1, 0, 0)}
    assert found[0] == found[1]
