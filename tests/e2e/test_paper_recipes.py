"""`specexec bench paper`: every recipe's small form on the demo pair, held to its claims."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_rows import ENVIRONMENT
from cli_runner import run_cli

from specexec_cli.bench import environment as environment_module
from specexec_cli.papers import RECIPES, Claim, Finding, Recipe
from specexec_cli.papers.lab import Lab, Rate
from specexec_cli.papers.report import text_of, write
from specexec_cli.papers.specexec_rates import PAPER, SPECINFER, grows
from specexec_cli.session import Session, TextSession


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One lab for all recipes: sessions stay open, and rows that several need are run once."""
    opened: dict[str | None, TextSession] = {}

    def open_one(sets: object, tokens: int, draft: str | None) -> TextSession:
        if draft not in opened:
            opened[draft] = Session.open(pair="demo", draft=draft, dtype="float32", offload="none")
        return opened[draft]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(environment_module, "environment", lambda: ENVIRONMENT)
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield Lab(open_one, tmp_path_factory.mktemp("papers"))
        for session in opened.values():
            session.close()


@pytest.mark.parametrize("name", RECIPES)
def test_the_claim_holds_on_the_demo_pair(lab: Lab, name: str) -> None:
    finding = RECIPES[name].run(lab)
    assert finding.claims, "a recipe without a claim cannot fail"
    assert [claim.text for claim in finding.claims if not claim.held] == []
    report, *figures = write(RECIPES[name], finding, lab.folder, "png")
    assert all(f"holds: {claim.text}" in report.read_text() for claim in finding.claims)
    assert len(figures) == len(finding.figures)
    assert all(path.stat().st_size > 5_000 for path in figures)
    for table in finding.tables:
        assert all(len(row) == len(table.header) for row in table.rows), table.title


def test_a_direction_that_is_lost_is_told() -> None:
    # of two standard errors, 0.1 each, of the difference: 0.28
    taus = {(PAPER, 16): 3.0, (SPECINFER, 16): 3.0, (PAPER, 64): 3.5, (SPECINFER, 64): 3.7}
    greedy = {("c4", 0.0, *key): Rate(tau, 0.1, 9) for key, tau in taus.items()}
    assert [claim.held for claim in grows(greedy)] == [True, False]
    rates = {("c4", 0.6, *key): Rate(tau, 0.1, 9) for key, tau in taus.items()}
    assert [claim.held for claim in grows(rates)] == [True, True]
    rates["c4", 0.6, SPECINFER, 64] = Rate(3.8, 0.1, 9)
    assert [claim.held for claim in grows(rates)] == [True, False]
    rates["c4", 0.6, PAPER, 64] = Rate(2.9, 0.1, 9)
    assert [claim.held for claim in grows(rates)] == [False, False]


def test_a_lost_claim_is_one_line_and_exit_code_11(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding(tables=[], claims=[Claim("the moon is near", False)], notes=["seen here"])
    moon = Recipe("moon", "it is near", lambda lab: finding)
    monkeypatch.setattr("specexec_cli.cli.bench_paper.RECIPES", {"moon": moon})
    ran = run_cli("bench", "paper", "moon", "--out", tmp_path, "-q")
    assert (ran.code, ran.error) == (11, "not so here: moon: the moon is near")
    assert "LOST: the moon is near" in (tmp_path / "moon.md").read_text()
    assert text_of(moon, finding, "table") in ran.out
    content = json.loads(run_cli("bench", "paper", "moon", "--out", tmp_path, "-o", "json").out)
    assert content["claims"] == [{"text": "the moon is near", "held": False}]


def test_recipes_are_listed_and_a_wrong_name_gets_one_line() -> None:
    listed = run_cli("bench", "paper")
    assert (listed.code, [line.split()[0] for line in listed.out.splitlines()]) == (0, [*RECIPES])
    ran = run_cli("bench", "paper", "specexec-figure-33")
    assert (ran.code, "Did you mean 'specexec-figure-3'?" in ran.error) == (2, True)
    assert run_cli("bench", "paper", "specexec-figure-3", "--prompts", "1").code == 2
