"""What a session learns about its pair is kept for the next one, and never stands in the way."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from specexec_cli import quiet
from specexec_cli.config import GenerationConfig, TreeConfig
from specexec_cli.drafting.iteration_cost import CostModel, Iteration, IterationCost
from specexec_cli.drafting.learned import Learned
from specexec_cli.planning.request import TreeRequest
from specexec_cli.session import Session, local_session

PROMPT = "def add(a, b):\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def write(remember: bool, notice: Callable[[str], None] = lambda text: None) -> list[int]:
    """Tokens of a short text by a session of its own."""
    tree = TreeConfig(budget=16, max_depth=8, batch=4, policy="cost")
    with Session.open(
        model="demo", dtype="float32", offload="none", remember=remember, notice=notice
    ) as session:
        steps = session.generate(PROMPT, tree=tree, generation=GenerationConfig(max_tokens=24))
        return [token for step in steps for token in step.tokens]


def test_the_next_session_begins_with_what_the_last_one_learned(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # measured, trees may seem not to pay while other tests run
    cheap = CostModel(base_s=1.0, row_s=0.0, knee_rows=64.0, step_s=1e-3)
    monkeypatch.setattr(local_session, "measured_prior", lambda *arguments: cheap)
    text = write(remember=True)
    (kept,) = cache.rglob("learned.json")
    first = json.loads(kept.read_text())
    assert set(first["trusts"]) == {"greedy"}
    (cost,) = first["costs"].values()
    assert len(cost["prior"]) == 5
    remembered: list[list[float]] = []
    remember = IterationCost.remember

    def recorded(self: IterationCost, iterations: Sequence[Iteration]) -> None:
        remembered.extend([*iteration] for iteration in iterations)
        remember(self, iterations)

    monkeypatch.setattr(IterationCost, "remember", recorded)
    assert write(remember=True) == text
    assert remembered[: len(cost["iterations"])] == cost["iterations"]
    assert len(cost["iterations"]) > 1


def test_what_passes_took_beside_other_programs_is_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(remember=True)
    (kept,) = cache.rglob("learned.json")
    costs = json.loads(kept.read_text())["costs"]
    kept_trusts = kept.read_text().partition('"costs"')[0]
    busy = lambda: os.times().user + 1.9 * time.perf_counter()  # noqa: E731
    monkeypatch.setattr(quiet, "user_seconds", busy)
    monkeypatch.setattr(quiet, "_SHORTEST_S", 0.0)
    write(remember=True)
    assert json.loads(kept.read_text())["costs"] == costs
    assert kept.read_text().partition('"costs"')[0] != kept_trusts
    (runs,) = (cache / "specexec" / "runs").iterdir()
    assert [run["busy"] for run in json.loads(runs.read_text())] == [False, True]


def test_nothing_is_kept_unless_asked_for(cache: Path) -> None:
    write(remember=False)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_notice(cache: Path) -> None:
    (cache / "specexec").write_text("a file where a folder should be")
    notices: list[str] = []
    assert write(remember=True, notice=notices.append) == write(remember=False)
    assert len([text for text in notices if "cannot be kept" in text]) == 1


def test_the_tree_that_memory_is_planned_for_becomes_the_session_s() -> None:
    with Session.open(model="demo", tree=TreeRequest(budget=77, policy="fixed")) as session:
        assert session.pair.tree.budget == 77
        steps = list(session.generate(PROMPT, generation=GenerationConfig(max_tokens=8)))
        assert max(step.tree_nodes for step in steps) <= 77


def test_what_is_put_in_place_of_it_learns_from_then_on() -> None:
    """As bench does for every case, so that none profits from another."""
    tree = TreeConfig(budget=16, max_depth=8, batch=4, policy="cost")
    trusts = []
    with Session.open(model="demo", dtype="float32", offload="none") as session:
        for _ in range(2):
            session.forget()
            session.learned = Learned(session.classifier)
            list(session.generate(PROMPT, tree=tree, generation=GenerationConfig(max_tokens=24)))
            trusts.append(session.learned.trust("greedy"))
    assert None not in trusts
    assert trusts[0] is not trusts[1]
