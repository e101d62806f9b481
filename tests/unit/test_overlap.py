"""Drafting beside the pass: real models and a stream that comes late, and the words around it."""

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
    open_float32,
    save_byte_tokenizer,
    save_checkpoint,
    save_pair,
)
from fake_cuda import CUDA, fake_cuda
from late_layers import layers_come_late

from specexec_cli.cli.render import stats_line
from specexec_cli.config import GenerationConfig, SamplingConfig, Tier, TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.forest import Forest
from specexec_cli.drafting.iteration_cost import CostModel
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.policies import NextTree
from specexec_cli.drafting.policies.cost import Cost
from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench.cases import variant
from specexec_cli.models import graphs, kv_cache
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.memory import DoesNotFitError
from specexec_cli.sampling import Sampler
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession
from specexec_cli.verify.verifier import LocalTarget

TREE = TreeConfig(budget=12, max_depth=4, batch=3, overlap="auto")
TURNS = [list(range(10, 20)), [5, 6], [7]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), target=byte_llama(), noise=0.03)
    return {"target": str(target), "draft": str(draft)}


@pytest.fixture(scope="module")
def session(pair: dict[str, str]) -> Iterator[LocalSession]:
    with Session.open(**pair, dtype="float32", offload="ssd", device="cpu") as session:
        assert isinstance(session, LocalSession)
        yield session


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    layers_come_late(monkeypatch, 3)


def conversation(session: LocalSession, tree: TreeConfig, sampling: SamplingConfig) -> list[int]:
    """Three turns, each behind the answer to the one before."""
    session.forget()
    text: list[int] = []
    method = "specexec" if tree.overlap != "off" else "autoregressive"
    for turn in TURNS:
        text += turn
        steps = session.generate(
            text, method=method, tree=tree, sampling=sampling,
            generation=GenerationConfig(max_tokens=12),
        )  # fmt: skip
        text += [token for step in steps for token in step.tokens]
    return text


@pytest.mark.parametrize(
    ("temperature", "policy", "penalty"),
    [(0.0, "fixed", 1.0), (0.8, "cost", 1.0), (0.8, "fixed", 1.2)],
)
@pytest.mark.usefixtures("late")
def test_turns_are_those_of_plain_decoding(
    session: LocalSession, temperature: float, policy: str, penalty: float
) -> None:
    sampling = SamplingConfig(temperature=temperature, seed=3, repetition_penalty=penalty)
    tree = replace(TREE, policy=policy, past=True)
    plain = conversation(session, replace(tree, overlap="off"), sampling)
    assert conversation(session, tree, sampling) == plain
    assert session.stats.draft_hidden_s > 0.0
    assert session.stats.verify_s > session.stats.draft_hidden_s
    drafter = session.drafter
    assert_fresh(session.target.model, session.target.state, session.target.tokens)
    drafter.rows.state.crop(len(drafter.rows.tokens))  # behind them is what was found ahead
    assert_fresh(drafter.rows.model, drafter.rows.state, drafter.rows.tokens)


@pytest.mark.usefixtures("late")
def test_the_policy_cost_counts_the_draft_steps_that_were_taken(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children of a root that was found ahead are known: no step is taken for them."""
    target = LocalTarget(open_float32(Path(pair["target"])))
    draft = open_float32(Path(pair["draft"]), None)
    sampler = Sampler(SamplingConfig())
    prior = CostModel(base_s=1.0, row_s=0.0, knee_rows=0.0, step_s=0.01)
    learned = Learned(cost_prior=lambda: prior)
    tree = replace(TREE, policy="cost")
    drafter = ModelDrafter(draft, sampler, tree, draft.vocab_size, learned=learned)
    policy = drafter._policy
    assert isinstance(policy, Cost)
    forward, grow = draft.forward, policy.grow
    passes = 0
    grown: list[tuple[int, int, int]] = []  # the root's steps, all steps as counted, as taken

    def forward_counted(*arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*arguments)

    def grow_watched(next_tree: NextTree) -> Any:
        before = passes
        found = grow(next_tree)
        grown.append((next_tree.root_steps, policy._steps, passes - before))
        return found

    monkeypatch.setattr(draft, "forward", forward_counted)
    monkeypatch.setattr(policy, "grow", grow_watched)
    assert list(specexec(target, drafter, sampler, TURNS[0], 40, (), ahead=drafter))
    target.close()
    roots, counted, taken = zip(*grown, strict=True)
    assert set(roots) == {0, 1}
    assert counted == taken


@pytest.mark.usefixtures("late")
def test_what_was_hidden_is_told(session: LocalSession) -> None:
    conversation(session, TREE, SamplingConfig())
    stats = session.stats
    assert f"draft {stats.draft_s:.2f} s + {stats.draft_hidden_s:.2f} s hidden" in stats_line(stats)
    assert stats.named()["draft_hidden_s"] == stats.draft_hidden_s
    settings = {"method": "specexec", "overlap": "on"}
    assert variant(settings) == "specexec overlap"


def test_overlap_that_cannot_be_is_refused(pair: dict[str, str]) -> None:
    with Session.open(**pair, dtype="float32", device="cpu") as resident:
        for overlap in ("auto", "off"):
            list(resident.generate([5, 6], tree=replace(TREE, overlap=overlap)))
            assert resident.stats.draft_hidden_s == 0.0
        with pytest.raises(ConfigError, match="`overlap='on'`: no pass of this session waits"):
            list(resident.generate([5, 6], tree=replace(TREE, overlap="on")))
    with pytest.raises(ConfigError, match="`overlap='on'` is for one text at a time"):
        Forest(None, replace(TREE, overlap="on"), 2, Learned())


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU, and the stand-in for a GPU."""
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    with fake_cuda():
        yield CUDA


def opened(folder: str, device: torch.device, tiers: Tier | None) -> StreamedModel:
    return StreamedModel.open(
        read_checkpoint(Path(folder)), device=device, dtype=torch.float32, tiers=tiers
    )


@pytest.mark.parametrize(
    ("device", "capacity", "temperature"),
    [("cpu", 256, 0.0), ("cpu", 256, 0.8), ("cuda", 256, 0.0), ("cuda", 24, 0.8)],
    indirect=["device"],
)
@pytest.mark.usefixtures("late")
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
    draft = opened(pair["target"], device, None)
    steps: list[Any] = []
    trees: list[Any] = []
    for shares in (False, True):
        target = LocalTarget(opened(pair["target"], device, "ssd"))
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
            decoded = list(specexec(target, drafter, sampler, turn, 20, (), ahead=drafter))
            assert sum(step.draft_hidden_s for step in decoded) > 0.0
            steps[-1] += [(step.tokens, step.tree_nodes, step.tree_depth) for step in decoded]
            assert_fresh(target.model, target.state, target.tokens)
            own_slots = drafter.rows.state.length - (len(target.tokens) if shares else 0)
            assert own_slots <= 2 * TREE.budget + 1 or not shares
        if device.type == "cuda":
            assert drafter.rows.steps is not None
            assert drafter.rows.steps._steps, "steps were captured"
        target.close()
    assert steps[0] == steps[1]
    assert trees[0] == trees[1]
    assert max(len(tokens) for tokens, *_ in steps[0]) > 1


@pytest.mark.usefixtures("late")
def test_turns_of_a_target_that_drafts_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: torch.device
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_checkpoint(tmp_path / "target", byte_llama(hidden_size=64, intermediate_size=128))
    save_byte_tokenizer(tmp_path / "target")
    asked = {"target": str(tmp_path / "target"), "draft": "self", "offload": "ssd"}
    if device.type == "cuda":  # as little memory as the layers can be streamed in
        free = [1_000_000]
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free[0], free[0]))
        with pytest.raises(DoesNotFitError) as short:
            Session.open(**asked, device=str(device))
        free[0] = int(1.05 * short.value.needed_bytes)
    with Session.open(**asked, device=str(device)) as session:
        assert isinstance(session, LocalSession)
        assert session.target.model.waits
        plain = conversation(session, replace(TREE, overlap="off"), SamplingConfig())
        assert conversation(session, TREE, SamplingConfig()) == plain
        drafter, target = session.drafter, session.target
        # its cache is the target's, and a little behind it
        assert [layer._first for layer in drafter.rows.state.layers] == list(target.state.layers)
        work = session.decision.work
        assert drafter.rows.state.layers[0].keys.shape[2] <= work.draft_slots + 1
        assert work.draft_slots < work.slots / 2
        assert work.shares_cache
        assert session.stats.draft_hidden_s > 0.0
