"""A drafter that goes on from its target's rows and states, on the CPU and beside a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    assert_fresh,
    byte_llama,
    random_tokens,
    recurrent_parts,
    save_byte_tokenizer,
    save_checkpoint,
    save_pair,
)
from fake_cuda import CUDA, fake_cuda
from gguf_toys import save_hybrid

from specexec_cli.config import (
    DtypeName,
    GenerationConfig,
    Method,
    SamplingConfig,
    Tier,
    TreeConfig,
)
from specexec_cli.core import DraftTree, StepResult, common_prefix
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting import draft_rows
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.engine.factory import open_engine
from specexec_cli.engine.text import TextRequest
from specexec_cli.models import graphs, kv_cache
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.memory import DoesNotFitError, checkpoints, fixed_parts
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.sampling import Sampler
from specexec_cli.session import Session, open_session
from specexec_cli.session.local_session import LocalSession
from specexec_cli.verify.verifier import LocalTarget

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from conformance_check import save
from conformance_configs import WORDS

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


def opened(
    folder: str, device: torch.device, tiers: Tier | None, dtype: torch.dtype = torch.float32
) -> StreamedModel:
    return ModelSpec(device=device, dtype=dtype, tiers=tiers).open(read_checkpoint(Path(folder)))


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


class Drafted:
    """Texts that a model writes with drafts of its own weights.

    Args:
        shares: whether the drafter goes on from the target's state; otherwise it reads all itself.
    """

    def __init__(
        self, folder: Path, draft: StreamedModel, patch: pytest.MonkeyPatch, *, shares: bool
    ) -> None:
        self.target = LocalTarget(opened(str(folder), draft.device, "ssd", draft.dtype))
        self.sampler = Sampler(SamplingConfig())
        self.drafter = ModelDrafter(
            draft, self.sampler, replace(TREE, calibrated=False), draft.vocab_size,
            shared=self.target if shares else None,
        )  # fmt: skip
        self.trees: list[DraftTree] = []
        self.read: list[list[int]] = []  # rows of each draft pass, by tree
        self.unread: list[int] = []  # committed tokens that the target had not read, by tree
        forward, grow = draft.forward, self.drafter.grow

        def counted(rows: Any, *others: Any) -> Any:
            self.read[-1].append(len(rows.tokens))
            return forward(rows, *others)

        def watched(context: Sequence[int], *others: Any) -> DraftTree:
            self.unread.append(len(context) - len(self.target.tokens))
            self.read.append([])
            self.trees.append(grow(context, *others))
            return self.trees[-1]

        patch.setattr(draft, "forward", counted)
        patch.setattr(self.drafter, "grow", watched)

    def write(self, text: Sequence[int]) -> list[StepResult]:
        """Some tokens behind a text, of which the target keeps what it has read already.

        Before it, an iteration ends between the target's pass and its commit.
        """
        self.target.crop(common_prefix(self.target.tokens, text[:-1]))
        self.target.verify(text[len(self.target.tokens) :], DraftTree.empty())
        first = len(self.trees)
        steps = list(specexec(self.target, self.drafter, self.sampler, text, 8, ()))
        for tree, step in zip(self.trees[first:], steps, strict=True):
            assert_no_draft_was_wrong(tree, step.tokens)
        return steps


def assert_no_draft_was_wrong(tree: DraftTree, tokens: Sequence[int]) -> None:
    """The target's tokens leave the tree at a leaf: where a node has children, one is right."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(
            zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        )
    }
    node = -1
    for token in tokens:
        if (node, token) not in children:
            break
        node = children[node, token]
    assert node not in tree.parents


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "model_type", ["qwen3_5_text", "falcon_h1", "nemotron_h", "lfm2", "jamba", "kimi_linear"]
)
def test_a_copy_goes_on_from_the_states_of_its_target(
    model_type: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the target's weights it drafts as if it had read the text, and reads nothing twice."""
    save(model_type, tmp_path, 0.0, widen=8)  # heads of 64: a row's bits are its own in bfloat16
    draft = opened(str(tmp_path), torch.device("cpu"), None, dtype)
    words = [WORDS[token % len(WORDS)] for token in random_tokens(80)]
    found = []
    for shares in (False, True):
        with monkeypatch.context() as patch:
            drafted = Drafted(tmp_path, draft, patch, shares=shares)
            steps = drafted.write(words[:30])
            # another text, whose beginning the first has: the target goes back to a checkpoint
            steps += drafted.write([*words[:20], *words[30:40]])
            # the next turn of its chat
            steps += drafted.write([*drafted.target.tokens, *words[40:46]])
            found.append(
                [(each.tokens.tolist(), each.parents.tolist(), each.log_probs.tolist())
                 for each in drafted.trees]
            )  # fmt: skip
            assert max(len(step.tokens) for step in steps) > 1
            if not shares:
                continue
            assert [read[0] for read in drafted.read if read] == [
                unread for unread, read in zip(drafted.unread, drafted.read, strict=True) if read
            ]
            # what a prompt of some length brings is left to the target
            patch.setattr(draft_rows, "OWN_PROMPT_ROWS", 4)
            first = len(drafted.read)
            drafted.write([*drafted.target.tokens, *words[46:80]])
            assert drafted.read[first] == []
            assert drafted.read[first + 1][0] == 1
            states = recurrent_parts(drafted.drafter.rows.state)
            assert states
            for own, theirs in zip(states, recurrent_parts(drafted.target.state), strict=True):
                assert own.base is own.head is theirs.base
                assert not own.checkpoints
    assert found[0] == found[1]


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A target with recurrent layers that writes text, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_hybrid(tmp_path / "target")
    return str(tmp_path / "target")


def test_a_session_plans_one_set_of_states_for_target_and_copy(
    hybrid: str, device: torch.device
) -> None:
    with Session.open(model=hybrid, device="cpu", dtype="float32", method="autoregressive",
                      context_tokens=256) as session:  # fmt: skip
        plain = conversation(session, "autoregressive")
    with Session.open(model=hybrid, draft="self", device=str(device), dtype="float32",
                      context_tokens=256) as session:  # fmt: skip
        assert isinstance(session, LocalSession)
        assert conversation(session, "specexec") == plain
        assert session.stats.generation_rate > 1
        assert not session.drafter.rows.state.layers[0].parts[0].keeps_checkpoints
        decision = session.decision
        assert decision.draft is not None
        assert decision.work.shares_cache
        target, draft, apart = (decision.target.sizes, decision.draft.sizes,
                                replace(decision.work, shares_cache=False))  # fmt: skip
        name = "draft model's recurrent states"
        less = (dict(fixed_parts(target, draft, apart))[name]
                - dict(fixed_parts(target, draft, decision.work))[name])  # fmt: skip
        kept = [part for each in recurrent_parts(session.target.state) for part in each.base]
        assert less == sum(part.numel() * part.element_size() for part in kept)
        assert checkpoints(target, draft, decision.work) == checkpoints(target, None, apart)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_texts_and_their_copy_are_the_plain_ones(hybrid: str, dtype: DtypeName) -> None:
    """Where several texts share passes the copy reads each itself, and keeps a state for each."""
    prompts = [[*range(10, 40), last] for last in (50, 51, 52)]
    ending = GenerationConfig(max_tokens=16)
    asked = Request(model=hybrid, device="cpu", dtype=dtype, context_tokens=64)
    with open_session(replace(asked, method="autoregressive")) as session:
        alone = [
            [token for step in session.generate(prompt, generation=ending) for token in step.tokens]
            for prompt in prompts
        ]
    tree = TreeRequest(budget=12, depth=4, policy="fixed", past=False)
    with open_session(replace(asked, draft="self", tree=tree, slots=3)) as session:
        assert isinstance(session, LocalSession)
        assert not session.decision.work.shares_cache
        engine = open_engine(session, slots=3, most_waiting=3)
        running = [
            engine.submit(
                TextRequest(prompt=tuple(prompt), sampling=SamplingConfig(), generation=ending)
            )
            for prompt in prompts
        ]
        steps = [list(each) for each in running]
        engine.close()
    assert [[token for step in text for token in step.tokens] for text in steps] == alone
    assert max(len(step.tokens) for text in steps for step in text) > 1
