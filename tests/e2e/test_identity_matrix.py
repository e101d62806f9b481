"""Every pair of settings that bear on drafting writes the text of plain decoding.

Not their whole product: cases are chosen so that each value of a setting occurs with each of every
other one, in several turns of one conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import (
    assert_fresh,
    byte_llama,
    open_float32,
    random_tokens,
    save_byte_tokenizer,
    save_checkpoint,
    save_pair,
)
from toys import classifier

from specexec_cli.config import GenerationConfig, SamplingConfig, TreeConfig
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.search import ROOT
from specexec_cli.drafting.sources import policies_for
from specexec_cli.models.own_copy import own_copy
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.shared_cache import SharedCache
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.sampling import Sampler
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession
from specexec_cli.verify.verifier import LocalTarget

SETTINGS: dict[str, tuple[object, ...]] = {
    "draft": ("separate", "self", "self-2", "suffix"),
    "past": (True, False),
    "policy": ("fixed", "heuristic", "disco", "cost"),
    "calibrated": (True, False),
    "temperature": (0.0, 0.8),
    "turns": (1, 3),
}
Case = tuple[object, ...]
# each turn is a text's beginning, or words behind the answer to the one before
TURNS = ([*b"def f(x):"], [*b"\nand g"], [*b"f f f"])
CONFIG = byte_llama(hidden_size=64, intermediate_size=128)


def possible(case: Case) -> bool:
    """A classifier is of a pair of models, and a text's own past is none."""
    return (case[0], case[2]) != ("suffix", "disco")


def pairs(case: Case) -> set[tuple[int, object, int, object]]:
    """Two settings each, with their values."""
    told = enumerate(case)
    return {(*one, *other) for one, other in itertools.combinations(told, 2)}


def cases() -> list[Case]:
    """The case that has the most new pairs, again and again until there are none."""
    every = [case for case in itertools.product(*SETTINGS.values()) if possible(case)]
    left = set().union(*map(pairs, every))
    chosen = []
    while left:
        chosen.append(max(every, key=lambda case: len(pairs(case) & left)))
        left -= pairs(chosen[-1])
    return chosen


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A target and a draft model that is a noisy copy of it, and an empty cache folder."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = save_pair(folder, target=CONFIG, noise=0.03)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield {"model": str(target), "separate": str(draft)}


@pytest.fixture(scope="module")
def sessions(folders: dict[str, str]) -> Iterator[dict[str, LocalSession]]:
    opened: dict[str, LocalSession] = {}
    for draft in SETTINGS["draft"]:
        session = Session.open(
            model=folders["model"], draft=folders.get(str(draft), str(draft)), offload="ssd",
            device="cpu", dtype="float32", context_tokens=128,
        )  # fmt: skip
        assert isinstance(session, LocalSession)
        opened[str(draft)] = session
        if session.pair.draft is not None:
            named = {"target": session.pair.target.repo, "draft": session.pair.draft.repo}
            classifier().save(session.pair_folder, named)
    yield opened
    for session in opened.values():
        session.close()


def conversation(
    session: LocalSession, method: str | None, temperature: float, turns: int, tree: TreeConfig
) -> tuple[list[list[int]], int]:
    """The answer of each turn, and the passes that they took."""
    session.forget()
    text: list[int] = []
    answers, passes = [], 0
    for turn in TURNS[:turns]:
        text += [4 + byte for byte in turn]
        steps = list(
            session.generate(
                text, method=method, tree=tree,  # type: ignore[arg-type]
                sampling=SamplingConfig(temperature=temperature, seed=5),
                generation=GenerationConfig(max_tokens=14),
            )
        )  # fmt: skip
        answers.append([token for step in steps for token in step.tokens])
        text += answers[-1]
        passes += len(steps)
    return answers, passes


@pytest.fixture(scope="module")
def plain(sessions: dict[str, LocalSession]) -> object:
    """(temperature, turns) -> what plain decoding answers; each computed once."""

    @cache
    def answers(temperature: float, turns: int) -> tuple[list[list[int]], int]:
        session = sessions["separate"]
        return conversation(session, "autoregressive", temperature, turns, session.pair.tree)

    return answers


def test_every_pair_of_values_is_among_the_cases() -> None:
    assert {*SETTINGS["policy"]} == {*policies_for("specexec")}, "a new policy belongs here"
    seen = set().union(*map(pairs, cases()))
    for one, other in itertools.combinations(range(len(SETTINGS)), 2):
        values = list(SETTINGS.values())
        wanted = {(one, a, other, b) for a in values[one] for b in values[other]}
        assert wanted - seen <= {(0, "suffix", 2, "disco")}
    assert len(cases()) < 30


@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(map(str, case)))
def test_the_text_is_that_of_plain_decoding(case, sessions, plain) -> None:
    draft, past, policy, calibrated, temperature, turns = case
    tree = TreeConfig(budget=12, max_depth=6, batch=4, past=past, policy=policy,
                      calibrated=calibrated)  # fmt: skip
    session = sessions[draft]
    expected, plain_passes = plain(temperature, turns)
    found, passes = conversation(session, None, temperature, turns, tree)
    assert found == expected
    assert sum(map(len, found)) > 8 * turns
    assert passes <= plain_passes
    if draft in ("separate", "self") and policy == "fixed":
        assert passes < plain_passes, "drafts were accepted"
    assert_fresh(session.target.model, session.target.state, session.target.tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_own_rows_of_a_shared_cache_equal_a_fresh_prefill(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the target's exact rows: those of committed tokens that the target is about to run,
    and of every expanded node, as if its path had been run alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_checkpoint(tmp_path / "target", CONFIG, std=0.12)
    save_byte_tokenizer(tmp_path / "target")
    copy = own_copy(read_checkpoint(tmp_path / "target"), 4)
    target = LocalTarget(open_float32(tmp_path / "target"))
    draft = open_float32(copy.folder, None)
    sampler = Sampler(SamplingConfig(temperature=temperature, seed=3))
    tree = TreeConfig(budget=12, max_depth=4, batch=3)
    drafter = ModelDrafter(draft, sampler, tree, draft.vocab_size, shared=target)
    grow, compared = drafter.grow, []

    def grow_and_compare(*arguments: object) -> object:
        grown = grow(*arguments)  # type: ignore[arg-type]
        compared.append(_compare_own_rows(drafter, target))
        return grown

    monkeypatch.setattr(drafter, "grow", grow_and_compare)
    steps = list(specexec(target, drafter, sampler, random_tokens(10), 30, ()))
    assert max(len(step.tokens) for step in steps) > 1
    assert max(compared) > 4, "rows of nodes"
    assert_fresh(target.model, target.state, target.tokens)
    target.close()
    draft.close()


def _compare_own_rows(drafter: ModelDrafter, target: LocalTarget) -> int:
    """How many nodes have a row; each is that of a prefill of its path."""
    cache, nodes = drafter.rows.state, drafter.rows.tree._nodes
    assert isinstance(cache, SharedCache)
    shared, context = cache.layers[0].shared, list(drafter.rows.context)
    assert context[:shared] == list(target.tokens)
    if drafter.rows.tokens != context:  # at the end of the text no tree was wanted
        return 0
    assert cache.length == len(context) + len(nodes)
    for slot in (ROOT, *range(len(nodes))):
        fresh = SharedCache(target.state)
        fresh.copy(target.state, shared)
        tokens = [*context[shared:], *drafter.rows.tree.path(slot)]
        drafter.rows.model.forward(PassRows.chain(tokens, shared), fresh, [])
        place = len(context) - shared + slot  # ROOT is -1: the last committed token
        for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
            for part in ("keys", "values"):
                row = getattr(theirs, part)[:, :, theirs.length - 1]
                torch.testing.assert_close(getattr(ours, part)[:, :, place], row, rtol=0, atol=5e-5)
    return len(nodes)
