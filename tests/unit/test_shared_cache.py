"""A drafter that reads committed rows from its target's cache, on the CPU and beside a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    assert_fresh,
    byte_llama,
    save_byte_tokenizer,
    save_checkpoint,
    save_pair,
)
from fake_cuda import CUDA, fake_cuda

from specexec_cli.config import GenerationConfig, Method, SamplingConfig, Tier, TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.models import graphs, kv_cache
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.memory import DoesNotFitError
from specexec_cli.sampling import Sampler
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession
from specexec_cli.verify.verifier import LocalTarget

TREE = TreeConfig(budget=12, max_depth=4, batch=3)
TURNS = [list(range(10, 20)), [5, 6], [7]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), target=byte_llama(), noise=0.03)
    return {"model": str(target), "draft": str(draft)}


def conversation(session: LocalSession, method: Method) -> list[int]:
    """Three turns, each behind the answer to the one before."""
    session.forget()
    text: list[int] = []
    for turn in TURNS:
        text += turn
        steps = session.generate(
            text, method=method, tree=TREE, generation=GenerationConfig(max_tokens=12)
        )
        text += [token for step in steps for token in step.tokens]
    return text


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU, and the stand-in for a GPU."""
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    with fake_cuda():
        yield CUDA


def opened(folder: str, device: torch.device, tiers: Tier | None) -> StreamedModel:
    return ModelSpec(device=device, dtype=torch.float32, tiers=tiers).open(
        read_checkpoint(Path(folder))
    )


@pytest.mark.parametrize(
    ("device", "capacity", "temperature"),
    [("cpu", 256, 0.0), ("cpu", 256, 0.8), ("cuda", 256, 0.0), ("cuda", 24, 0.8)],
    indirect=["device"],
)
def test_a_drafter_that_reads_the_target_s_rows_grows_the_trees_of_one_that_has_its_own(
    pair: dict[str, str],
    device: torch.device,
    capacity: int,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told apart by nothing where the copy is as exact as the target."""
    monkeypatch.setattr(graphs, "_CAPACITY", 128)
    monkeypatch.setattr(kv_cache, "STEP_SLOTS", capacity)
    monkeypatch.setattr(kv_cache, "_GROWTH_SLOTS", 1)
    sampler = Sampler(SamplingConfig(temperature=temperature, seed=3))
    draft = opened(pair["model"], device, None)
    steps: list[Any] = []
    trees: list[Any] = []
    for shares in (False, True):
        target = LocalTarget(opened(pair["model"], device, "ssd"))
        tree = replace(TREE, calibrated=False)
        drafter = ModelDrafter(
            draft, sampler, tree, draft.vocab_size, shared=target if shares else None
        )
        steps.append([])
        trees.append([])
        grow = drafter.grow

        def watched(*given: Any, grow: Any = grow, found: list[Any] = trees[-1]) -> DraftTree:
            tree = grow(*given)
            found.append((tree.tokens.tolist(), tree.parents.tolist()))
            return tree

        monkeypatch.setattr(drafter, "grow", watched)
        # for the second the target's buffers grow from 96 to 120 slots, and the drafter's own stay
        for turn in (list(range(70, 130)), list(range(70, 136))):
            target.crop(0)
            target.reserve(len(turn) + 20 + TREE.budget)
            decoded = list(specexec(target, drafter, sampler, turn, 20, ()))
            steps[-1] += [(step.tokens, step.tree_nodes, step.tree_depth) for step in decoded]
            assert_fresh(target.model, target.state, target.tokens)
            own_slots = drafter.rows.state.length - (len(target.tokens) if shares else 0)
            assert own_slots <= TREE.budget + 1 or not shares
        if device.type == "cuda":
            assert drafter.rows.steps is not None
            assert drafter.rows.steps.prepared, "steps were captured"
        target.close()
    assert steps[0] == steps[1]
    assert trees[0] == trees[1]
    assert max(len(tokens) for tokens, *_ in steps[0]) > 1


def test_turns_of_a_target_that_drafts_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: torch.device
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_checkpoint(tmp_path / "target", byte_llama(hidden_size=64, intermediate_size=128))
    save_byte_tokenizer(tmp_path / "target")
    asked = {"model": str(tmp_path / "target"), "draft": "self", "offload": "ssd"}
    if device.type == "cuda":  # as little memory as the layers can be streamed in
        free = [1_000_000]
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free[0], free[0]))
        with pytest.raises(DoesNotFitError) as short:
            Session.open(**asked, device=str(device))
        free[0] = int(1.05 * short.value.needed_bytes)
    with Session.open(**asked, device=str(device)) as session:
        assert isinstance(session, LocalSession)
        assert session.settings["offload"] != "resident"
        assert conversation(session, "specexec") == conversation(session, "autoregressive")
        drafter, target = session.drafter, session.target
        # its cache is the target's, and a little behind it
        assert [layer._first for layer in drafter.rows.state.layers] == list(target.state.layers)
        work = session.decision.work
        assert drafter.rows.state.layers[0].keys.shape[2] <= work.draft_slots + 1
        assert work.draft_slots < work.slots / 2
        assert work.shares_cache
