"""`specexec bench paper`: every recipe's small form on the demo pair, held to its claims."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_rows import ENVIRONMENT
from cli_runner import run_cli

from specexec_cli.catalog.registry import load_registry
from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench import environment as environment_module
from specexec_cli.lab.bench import tables
from specexec_cli.lab.bench.adapters import Prompt
from specexec_cli.lab.bench.cases import Case
from specexec_cli.lab.bench.datasets import Dataset
from specexec_cli.lab.bench.runner import BenchPrompt, Run
from specexec_cli.lab.papers import RECIPES, Claim, Finding, Recipe, Setting
from specexec_cli.lab.papers.disco_latency import _saved
from specexec_cli.lab.papers.dsi_timeline import claims, timelines
from specexec_cli.lab.papers.lab import Lab, Rate
from specexec_cli.lab.papers.report import text_of, write
from specexec_cli.lab.papers.specexec_rates import (
    PAPER,
    SPECINFER,
    cooler,
    grows,
    stems,
    tree,
    wider,
)
from specexec_cli.lab.training import Text, folds
from specexec_cli.planning.chosen_models import choose_pair
from specexec_cli.planning.request import Request
from specexec_cli.session import Session, TextSession


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One lab for all recipes: sessions stay open, and rows that several need are run once."""
    opened: dict[str | None, TextSession] = {}

    def open_one(sets: object, tokens: int, draft: str | None) -> TextSession:
        if draft not in opened:
            opened[draft] = Session.open(model="demo", draft=draft, dtype="float32", offload="none")
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
    setting = lab.setting(RECIPES[name])
    report, *figures = write(RECIPES[name], finding, setting, lab.folder, "png")
    assert all(f"holds: {claim.text}" in report.read_text() for claim in finding.claims)
    assert len(figures) == len(finding.figures)
    assert all(path.stat().st_size > 5_000 for path in figures)
    for table in finding.tables:
        assert all(len(row) == len(table.header) for row in table.rows), table.title


def rates_of(taus: dict[tuple[str, int], float], t: float, spread: float = 0.0) -> Any:
    """Rates of 20 prompts, of SpecExec's trees by budget and of SpecInfer's stems of 8 tokens.

    Args:
        spread: how much prompts differ, the other way round from one budget to the next.
    """
    found = {}
    for (method, budget), tau in taus.items():
        shape = tree(budget, full=True) if method == PAPER else stems(budget // 8, 8)
        sign = 1 if budget == 16 else -1
        counts = [(tau + sign * spread * (-1) ** prompt, 1) for prompt in range(20)]
        found[method, shape] = Rate(tau, spread, counts, budget)
    return {("c4", t): found}


def test_a_direction_that_is_lost_is_told() -> None:
    taus = {(PAPER, 16): 3.0, (PAPER, 64): 3.5, (SPECINFER, 16): 2.0, (SPECINFER, 64): 3.2}
    for t in (0.0, 0.6):
        assert [claim.held for claim in grows(rates_of(taus, t))] == [True, True]
        # no more than two standard errors: 2 * 0.5 * 1.2 / sqrt(19) of a growth of 0.5
        assert not grows(rates_of(taus, t, spread=1.2))[0].held
        behind = {**taus, (SPECINFER, 16): 3.6}  # of all shapes that fit the best one counts
        assert [claim.held for claim in grows(rates_of(behind, t))] == [True, False]
        equal = {**taus, (PAPER, 64): 3.0, (SPECINFER, 64): 3.0}
        assert [claim.held for claim in grows(rates_of(equal, t))] == [False, False]
        assert len(grows(rates_of(taus, t), full=False)) == (2 if t == 0.0 else 1)


def test_what_else_section_5_2_says_is_told_apart_from_its_contrary() -> None:
    taus = {(PAPER, 64): 3.5, (SPECINFER, 64): 3.2}
    better = {**taus, (PAPER, 64): 3.9}
    (more,) = cooler(rates_of(better, 0.0) | rates_of(taus, 0.6)).values()
    (less,) = cooler(rates_of(taus, 0.0) | rates_of(better, 0.6)).values()
    assert (more.shown, less.shown) == (True, False)
    for on_c4, on_mt_bench, shown in ((taus, better, True), (better, taus, False)):
        (chat,) = rates_of(on_mt_bench, 0.6).values()
        (margin,) = wider(rates_of(on_c4, 0.6) | {("mt-bench", 0.6): chat}).values()
        assert margin.shown == shown


def test_macro_is_the_mean_over_prompts_and_micro_all_tokens_over_all_passes() -> None:
    one = Rate(12 / 5, 0.5, [(8, 1), (4, 4)], 0)
    assert (one.macro, one.macro_error) == pytest.approx((4.5, 3.5))
    assert str(one) == "2.40 ±0.50 micro, 4.50 ±3.50 macro"
    other = Rate(3.0, 0.5, [(8, 2), (4, 2)], 0)
    assert one.above(other).more == pytest.approx(12 / 5 - 3)
    assert one.macro_above(other).more == pytest.approx(4.5 - 3)


def test_a_lost_claim_is_one_line_and_exit_code_11(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding(tables=[], claims=[Claim("the moon is near", False)], notes=["seen here"])
    moon = Recipe("moon", "it is near", lambda lab: finding)
    monkeypatch.setattr("specexec_cli.lab.commands.bench_paper.RECIPES", {"moon": moon})
    ran = run_cli("bench", "paper", "moon", "--out", tmp_path, "-q")
    assert (ran.code, ran.error) == (11, "not so here: moon: the moon is near")
    report = (tmp_path / "moon--small.md").read_text()
    assert "LOST: the moon is near" in report
    assert "Here: no model, small form, seed 0." in report
    assert text_of(moon, finding, Setting(full=False, seed=0), "table") in ran.out
    content = json.loads(run_cli("bench", "paper", "moon", "--out", tmp_path, "-o", "json").out)
    assert [content[key] for key in ("form", "seed", "target")] == ["small", 0, None]
    assert content["claims"] == [{"text": "the moon is near", "held": False}]


def test_a_report_is_named_after_models_and_form(tmp_path: Path) -> None:
    finding = Finding(tables=[], claims=[Claim("the moon is near", True)])
    moon = Recipe("moon", "it is near", lambda lab: finding)
    settings = [
        Setting(full, seed=3, target="org/big", draft=draft)
        for full in (False, True)
        for draft in ("tiny", None)
    ]
    (first, *_), *more = (write(moon, finding, one, tmp_path, "png") for one in settings)
    assert first.name == "moon--org-big--tiny--small.md"
    assert "Here: org/big and tiny, small form, seed 3." in first.read_text()
    assert len({first, *(path for (path,) in more)}) == len(settings)


def test_memory_is_planned_for_the_longest_prompt_of_all_datasets() -> None:
    opened: list[tuple[list[str], int]] = []

    def open_one(sets: Sequence[Dataset], tokens: int, draft: str | None) -> Any:
        opened.append(([one.name for one in sets], tokens))
        return SimpleNamespace(pair=choose_pair(load_registry(), Request()))

    lab = Lab(open_one, Path())
    short, long = (
        Dataset(name, "here", (Prompt("1", (("user", text),), False),))
        for name, text in (("short", "word"), ("long", "word" * 9))
    )
    lab.session([short], 10)
    lab.session([short], 4)
    assert opened == [(["short"], 10)]
    lab.session([long], 4)
    assert opened[1:] == [(["short", "long"], 10)]
    lab.session([short, long], 12)
    lab.session([long], 10, "another")
    assert opened[2:] == [(["short", "long"], 12), (["short", "long"], 12)]


def test_all_datasets_of_a_recipe_are_planned_for_at_once(tmp_path: Path) -> None:
    class Opened(Exception):
        pass

    def open_one(sets: Sequence[Dataset], tokens: int, draft: str | None) -> Any:
        raise Opened([one.name for one in sets], tokens)

    for name in ("c4", "wikitext2"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name * 200}))
    with pytest.raises(Opened) as raised:
        RECIPES["specexec-table-2"].run(Lab(open_one, tmp_path, full=True, data=tmp_path))
    assert raised.value.args == (["c4", "wikitext2"], 128)


def test_prompts_are_taken_for_a_case_until_its_own_rate_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ten at a time; in the small form for every case alike."""
    steady, noisy = (Case("specexec", TreeConfig(budget=size), SamplingConfig(), 8)
                     for size in (128, 256))  # fmt: skip
    prompts = [BenchPrompt(str(number), (number,), "raw") for number in range(25)]
    data = Dataset("d", "here", ())

    class Measured:
        def measure(self, runs: Sequence[Run], done: object) -> list[Any]:
            return [
                {"metrics": {"generated_tokens": 8, "tree_nodes": 4.0, "target_passes":
                             4 if run.case == steady else 1 + 6 * (int(run.prompt.id) % 2)},
                 "id": run.prompt.id}
                for run in runs
            ]  # fmt: skip

    monkeypatch.setattr(Lab, "encoded", lambda *arguments: prompts)
    monkeypatch.setattr(Lab, "session", lambda *arguments: None)
    monkeypatch.setattr(Lab, "_bench", lambda *arguments: Measured())
    numbers = [str(number) for number in range(25)]
    for full in (True, False):
        lab = Lab(lambda *arguments: None, tmp_path, full=full)  # type: ignore[arg-type,return-value]
        found = lab.rows([steady, noisy], data)
        assert [row["id"] for row in found[steady]] == (numbers[:10] if full else numbers)
        assert [row["id"] for row in found[noisy]] == numbers


def test_a_run_that_was_stopped_goes_on_with_the_rows_that_it_has(lab: Lab, tmp_path: Path) -> None:
    data = lab.dataset("demo", chat=False, small=2)
    cases = [Case("specexec-paper", TreeConfig(budget=size, max_depth=2), SamplingConfig(), 4)
             for size in (2, 4)]  # fmt: skip
    run: list[str] = []

    def stopped(label: str) -> None:
        run.append(label)
        if len(run) == 3:
            raise KeyboardInterrupt

    def again(done: Callable[[str], None]) -> dict[Case, list[Any]]:
        return Lab(lambda *asked: lab.session([data], 4), tmp_path, done=done).rows(cases, data)

    with pytest.raises(KeyboardInterrupt):
        again(stopped)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"kind": "run", "key')  # killed while it wrote
    found = again(run.append)
    assert len(run) == 4, "the fourth of two cases and two prompts is what was left"
    assert [len(found[case]) for case in cases] == [2, 2]
    assert again(pytest.fail) == found


def test_a_timeline_of_one_target_server_is_told_apart_from_dsi_s() -> None:
    """One server runs a pass at a time; where no draft is right, DSI is not first."""
    right = [True, True, False, True, True, True]
    held = {servers: [claim.held for claim in claims(timelines(right, servers))]
            for servers in (1, 7)}  # fmt: skip
    assert held[7] == [True, True, True]
    assert held[1][:2] == [True, False]
    assert not claims(timelines([False] * 6, 7))[2].held
    changed = timelines(right, 7)
    changed["SI"] = {"target": [(0, 7), (6, 13)]}
    assert not claims(changed)[0].held


def test_the_error_of_a_gain_is_that_of_its_pairs() -> None:
    """One text takes 0.4 a token less than the static length's 1, the other 0.2: 0.3 ± 0.1."""
    found: Any = SimpleNamespace(by_text={"static": [(10.0, 10), (10.0, 10)],
                                          "disco": [(6.0, 10), (8.0, 10)]})  # fmt: skip
    assert _saved(found, "disco", "static") == pytest.approx((0.3, 0.1))


def texts(kind: str) -> list[Text]:
    """Texts whose first signal tells rightly what is accepted; or which signals, or labels, lie."""
    rng = np.random.default_rng(5)
    found = []
    for _ in range(20):
        accepted = rng.random(60) < np.repeat(rng.choice([0.95, 0.3], size=6), 10)
        signals = np.zeros((60, 11))
        signals[:, 0] = np.clip(accepted * 0.7 + rng.normal(0.15, 0.15, 60), 0, 1)
        if kind == "random features":
            signals = rng.random((60, 11))
        if kind == "shuffled labels":
            accepted = rng.permutation(accepted)
        found.append(Text(signals, accepted, 0.2 + 0.6 * accepted))
    return found


@pytest.mark.parametrize("kind", ["true", "random features", "shuffled labels"])
def test_a_classifier_that_knows_nothing_loses_its_claims(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lab, "texts", lambda *asked: texts(kind))
    lab = Lab(lambda *asked: pytest.fail("opened"), tmp_path)
    for name in ("disco-table-1", "disco-table-4"):
        claims = RECIPES[name].run(lab).claims
        knows = [claim for claim in claims if "expects more acceptance" in claim.text]
        assert len(knows) == 4, "of two draft costs and two kinds of labels"
        assert all(claim.held == (kind == "true") for claim in knows)
        if kind == "true":
            assert all(claim.held for claim in claims)


def test_with_few_texts_each_is_tested_once_by_a_classifier_that_has_not_seen_it() -> None:
    turns = folds(list(range(12)), seed=3)
    assert sorted(one for *_, test in turns for one in test) == list(range(12))
    assert all(sorted([*a, *b, *c]) == list(range(12)) for a, b, c in turns)


def test_texts_of_the_full_form_may_be_shorter() -> None:
    def lab(full: bool, most: int | None) -> Lab:
        return Lab(lambda *asked: pytest.fail("opened"), Path(), full=full, most_tokens=most)

    asked = [(True, None), (True, 32), (True, 500), (False, 8)]
    assert [lab(*one).tokens(128, 16) for one in asked] == [128, 32, 128, 16]
    for given, said in (("0", "--max-tokens must be 1 or more"), ("8", "add --full")):
        ran = run_cli("bench", "paper", "specexec-figure-3", "--max-tokens", given)
        assert (ran.code, said in ran.error) == (2, True)


def test_too_few_prompts_for_a_classifier_get_one_line(lab: Lab) -> None:
    few = Lab(lambda sets, tokens, draft: lab.session(sets, tokens, draft), lab.folder,
              most_prompts=4)  # fmt: skip
    with pytest.raises(ConfigError, match=r"^4 prompts of demo are too few.*5 are needed$"):
        RECIPES["disco-table-1"].run(few)


def test_labels_of_another_draft_model_are_its_own(lab: Lab) -> None:
    data = lab.dataset("demo", chat=False, small=1)
    (own,) = lab.texts(data, 12)
    with Session.open(model="demo", draft="self", dtype="float32", offload="none") as session:
        other = Lab(lambda sets, tokens, draft: session, lab.folder)
        (text,) = other.texts(data, 12)
    assert (text.conformity != own.conformity).any()


@pytest.mark.parametrize("columns", [60, 80])
def test_in_a_terminal_the_list_of_recipes_fits_it(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "width", lambda: columns)
    lines = run_cli("bench", "paper").out.splitlines()
    assert max(map(len, lines)) <= columns
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [*RECIPES]
    whole = " ".join(" ".join(lines).split())
    assert all(" ".join(one.printed.split()) in whole for one in RECIPES.values())


def test_recipes_are_listed_and_a_wrong_name_gets_one_line() -> None:
    listed = run_cli("bench", "paper")
    assert (listed.code, [line.split()[0] for line in listed.out.splitlines()]) == (0, [*RECIPES])
    ran = run_cli("bench", "paper", "specexec-figure-33")
    assert (ran.code, "Did you mean 'specexec-figure-3'?" in ran.error) == (2, True)
    assert run_cli("bench", "paper", "specexec-figure-3", "--prompts", "1").code == 2
