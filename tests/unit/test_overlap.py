"""Drafting beside the pass: real models and a stream that comes late, and the words around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from checkpoints import assert_fresh, byte_llama, save_pair

from specexec_cli.bench.cases import variant
from specexec_cli.cli.render import stats_line
from specexec_cli.config import GenerationConfig, SamplingConfig, TreeConfig
from specexec_cli.errors import ConfigError
from specexec_cli.offload.stream import LayerStream
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession

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
    """Each layer comes as much later as three draft steps take."""
    arrive = LayerStream._wait_for_turn

    def waiting(stream: LayerStream) -> None:
        for _ in range(3 if stream.meanwhile is not None else 0):
            stream.meanwhile()
        arrive(stream)

    monkeypatch.setattr(LayerStream, "_wait_for_turn", waiting)


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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("policy", ["fixed", "cost"])
@pytest.mark.parametrize("penalty", [1.0, 1.2])
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
    drafter = session._drafter
    assert_fresh(session._target.model, session._target._cache, session._target.tokens)
    drafter._cache.crop(len(drafter.tokens))  # behind them is what was found ahead
    assert_fresh(drafter.model, drafter._cache, drafter.tokens)


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
