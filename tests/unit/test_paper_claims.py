"""Each claim of a paper's recipe is lost where its direction is not there.

Recipes run on rates that are told, not measured, or with a part of the program exchanged.
tests/e2e/test_paper_recipes.py has the recipes' small forms, which hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specexec_cli.config import TreeConfig
from specexec_cli.drafting import search
from specexec_cli.lab import training
from specexec_cli.lab.baselines import searches
from specexec_cli.lab.bench import coverage, metrics
from specexec_cli.lab.bench.cases import Case
from specexec_cli.lab.bench.datasets import Dataset
from specexec_cli.lab.papers import RECIPES, disco, disco_latency, dsi, dsi_timeline
from specexec_cli.lab.papers.lab import Lab
from specexec_cli.lab.papers.specexec_rates import PAPER, SPECINFER
from specexec_cli.lab.simulate import heatmap, methods, published, table

Told = Callable[[Case, "str | None"], float]  # case, draft model -> tokens of a pass


class ToldLab(Lab):
    """A lab without models. Every case commits, with each of 20 prompts, the tokens it is told."""

    def __init__(self, told: Told = lambda case, draft: 1.0, text: Callable[[Case], int] = id):
        super().__init__(lambda *asked: pytest.fail("opened"), Path())
        self.told, self.text = told, text

    def session(self, sets: Sequence[Dataset], tokens: int, draft: str | None = None) -> Any:
        """A draft model of 40 tokens, whose predictions follow from the text alone."""

        def logits(tokens: Sequence[int], length: int) -> torch.Tensor:
            seed = hash(tuple(tokens[:length]))
            drawn = np.random.default_rng(abs(seed)).normal(size=(1, 40))
            return torch.from_numpy(3.0 * drawn)

        pair = SimpleNamespace(target=SimpleNamespace(name="told"))
        return SimpleNamespace(pair=pair, vocab_size=40, draft_logits=logits)

    def encoded(self, dataset: Dataset, tokens: int, draft: str | None = None) -> list[Any]:
        return [SimpleNamespace(tokens=(3, 1, 4)), SimpleNamespace(tokens=(1, 5, 9))]

    def rows(
        self, cases: Sequence[Case], dataset: Dataset, draft: str | None = None
    ) -> dict[Case, list[Any]]:
        def row(case: Case, prompt: int) -> dict[str, Any]:
            told = self.told(case, draft) + 0.1 * (-1) ** prompt
            return {"tokens": [self.text(case)], "metrics": {
                "generated_tokens": told, "target_passes": 1, "tree_nodes": 4.0}}  # fmt: skip

        return {case: [row(case, prompt) for prompt in range(20)] for case in cases}


def verdicts(name: str, lab: Lab | None = None) -> list[bool]:
    """Whether each claim of a recipe holds, in its order."""
    found = [claim.held for claim in RECIPES[name].run(lab or ToldLab()).claims]
    assert found, f"{name} claims nothing"
    return found


def nodes(case: Case) -> int:
    assert case.tree is not None
    return case.tree.budget


@pytest.mark.parametrize("name", ["figure-3", "figure-4", "section-5.2", "table-1", "table-2"])
def test_specexec_that_stops_where_specinfer_goes_on(name: str) -> None:
    def told(grows: str) -> Told:
        return lambda case, draft: 2 + (math.log2(nodes(case)) if case.method == grows else 0)

    assert all(verdicts(f"specexec-{name}", ToldLab(told(PAPER))))
    assert not any(verdicts(f"specexec-{name}", ToldLab(told(SPECINFER))))


def test_a_text_that_is_not_plain_decoding_s() -> None:
    assert verdicts("specexec-algorithm-1", ToldLab(text=lambda case: 7)) == [True] * 4
    of_one = ToldLab(text=lambda case: 8 if case.method == PAPER else 7)
    assert verdicts("specexec-algorithm-1", of_one) == [False, True] * 2


def test_searches_that_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(module: Any, name: str, by: Any) -> list[int]:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, by)
            held = verdicts("specexec-algorithm-2")
        return [number for number, one in enumerate(held) if not one]

    to_its_end = search.grow_tree

    def one_at_a_time(expand: Any, config: TreeConfig, depth: int, worth: Any) -> Any:
        return to_its_end(expand, replace(config, batch=1), depth, worth)

    assert verdicts("specexec-algorithm-2") == [True] * 4
    assert lost(searches, "grow_in_rounds", one_at_a_time) == [0, 1]
    assert lost(search, "grow_tree", searches.grow_beam_pruned) == [2, 3]
    assert lost(searches, "grow_beam_pruned", searches.grow_beam) == [3]


def test_a_draft_model_whose_tokens_are_shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(target: torch.Tensor, draft: torch.Tensor) -> list[bool]:
        def measure(session: Any, prompts: Any, sampling: Any, tokens: int, ranks: Any) -> Any:
            masses = [coverage.covered(target, own, ranks).mean(0).tolist()
                      for own in (draft, target)]  # fmt: skip
            return coverage.Coverage(ranks, *map(tuple, masses), len(target))

        monkeypatch.setattr(coverage, "measure_coverage", measure)
        return verdicts("specexec-figure-2")

    torch.manual_seed(0)
    target = 4 * torch.randn(50, 100)
    near = target + 0.5 * torch.randn(50, 100)
    assert measured(target, near) == [True, True]
    assert measured(target, near[:, torch.randperm(100)]) == [True, False]
    assert measured(target / 10, near / 10) == [False, True]


def test_a_draft_model_that_is_no_better_than_a_smaller_one() -> None:
    def told(own: float, small: float) -> ToldLab:
        return ToldLab(lambda case, draft: own if draft == "self" else small)

    assert verdicts("specexec-figure-5", told(4.0, 3.0)) == [True]
    assert verdicts("specexec-figure-5", told(3.0, 3.0)) == [False]
    assert verdicts("specexec-figure-5", told(3.0, 4.0)) == [False]


def test_beams_that_gain_nothing_unpruned() -> None:
    def told(every: float, last: float) -> ToldLab:
        return ToldLab(lambda case, draft: every if case.method == "beam" else last)

    assert verdicts("specexec-figure-6", told(3.0, 2.0)) == [True, True]
    assert verdicts("specexec-figure-6", told(2.0, 2.0)) == [False, True]
    assert verdicts("specexec-figure-6", told(2.0, 3.0)) == [False, False]


def test_budgets_that_are_exchanged() -> None:
    """The method that gains from more nodes has its fastest tree at more of them."""

    def told(grows: str) -> ToldLab:
        return ToldLab(lambda case, draft: 2 + nodes(case) * (0.1 if case.method == grows else 0))

    assert verdicts("specexec-figure-7", told(PAPER)) == [True]
    assert verdicts("specexec-figure-7", told(SPECINFER)) == [False]


def test_drafters_that_share_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    run = dsi._run

    def shared(drafters: Sequence[tuple[Sequence[bool], float]], *asked: Any) -> Any:
        return run([(right, cost * len(drafters)) for right, cost in drafters], *asked)

    monkeypatch.setattr(dsi, "_run", shared)
    assert verdicts("dsi-algorithm-1") == [False, False]


def test_dsi_that_is_another_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theorem 1 fails of SI, theorem 2 of plain decoding, proposition 1 and the mean of both."""

    def plain(latencies: Any, accepted: Sequence[bool], lookahead: int, servers: int) -> Any:
        return methods.run_autoregressive(latencies, len(accepted))

    def si(latencies: Any, accepted: Sequence[bool], lookahead: int, servers: int) -> Any:
        return methods.run_speculative(latencies, accepted, lookahead)

    found = []
    for other in (plain, si):
        monkeypatch.setattr(methods, "run_dsi", other)
        found.append(verdicts("dsi-theorems"))
    assert found == [[True, False, False, False], [False, True, False, False]]


@pytest.mark.parametrize("name", ["dsi-figure-1", "dsi-figure-6"])
@pytest.mark.parametrize(
    ("patched", "by", "lost"),
    [
        ("best_si_s", lambda si: lambda *asked: min(1.0, si(*asked)), ["SI is slower"]),
        ("drafting_dsi_s", lambda si: lambda cost, rate, servers: si(cost, rate),
         ["DSI / non-SI", "DSI is up to"]),
        ("drafting_dsi_s", lambda si: lambda cost, rate, servers: math.inf,
         ["DSI / SI", "DSI / non-SI", "DSI / better of both", "DSI is up to"]),
    ],
    ids=["SI that is never slower", "DSI that is SI", "DSI that never drafts"],
)  # fmt: skip
def test_a_heatmap_of_other_methods(
    name: str, patched: str, by: Any, lost: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heatmap, patched, by(heatmap.best_si_s))
    found = [one.text for one in RECIPES[name].run(ToldLab()).claims if not one.held]
    asked = [text for text in lost if text != "DSI is up to" or name == "dsi-figure-1"]
    assert len(found) == len(asked), found
    assert all(text.startswith(start) for text, start in zip(found, asked, strict=True)), found


@pytest.mark.parametrize("column", ["exact", "accounting", "restarts"])
def test_a_row_on_which_si_is_faster(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row's speedup of DSI over SI is turned round, in one column of three."""

    def told(row: table.PublishedRow, *asked: Any) -> table.SimulatedRow:
        found = table.SimulatedRow(row, row.speedup, row.speedup, row.speedup)
        turned = row is table.PUBLISHED[-1]
        return replace(found, **{column: 1 / row.speedup}) if turned else found

    monkeypatch.setattr(table, "simulate_row", told)
    assert verdicts("dsi-table-1") == [False]


def test_a_dsi_that_is_si_has_no_row_above_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "run_dsi", lambda *asked: methods.run_speculative(*asked[:3]))
    monkeypatch.setattr(published, "dsi_s", lambda *asked: published.si_s(*asked[:4]))
    row = table.simulate_row(table.PUBLISHED[0], 2, seed=0)
    assert max(row.exact, row.accounting) <= 1.0


def test_a_timeline_of_an_si_that_never_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = [(7 * token, 7 * (token + 1)) for token in range(12)]
    monkeypatch.setattr(dsi_timeline, "_si", lambda right: {"target": target})
    assert verdicts("dsi-timeline") == [True, True, True, False, False]


def test_best_lengths_of_drafts_without_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = metrics.improvement_factor
    assert verdicts("disco-figure-2") == [True] * 3
    for other, held in (
        (lambda rate, length, cost: factor(rate, length, 0.0), [False, False, False]),
        (lambda rate, length, cost: factor(0.8, length, cost), [False, False, True]),
    ):
        monkeypatch.setattr(metrics, "improvement_factor", other)
        assert verdicts("disco-figure-2") == held


def text_of(accepted: Sequence[bool]) -> training.Text:
    return training.Text(np.zeros((len(accepted), 11)), np.array(accepted), np.ones(len(accepted)))


def runs(lengths: Sequence[int]) -> training.Text:
    """A text with runs of accepted tokens of these lengths, each ended by a rejected one."""
    return text_of([right for length in lengths for right in (*[True] * length, False)])


def test_oracles_and_lengths_that_are_not_the_paper_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(texts: list[training.Text]) -> list[bool]:
        monkeypatch.setattr(disco, "sets", lambda lab: {"told": (texts, [], [])})
        return verdicts("disco-table-2")

    varied = runs([9, 0, 1, 12, 0, 3])
    assert told([varied]) == [True, True]
    assert told([runs([4, 4, 5, 4, 4, 5])])[0] is False
    assert told([runs([0, 1, 2, 4, 8, 16])])[1] is False
    monkeypatch.setattr(disco, "sets", lambda lab: {"told": ([varied], [], [])})
    assert verdicts("disco-figure-3") == [True, True]
    for length, held in ((1, [False, True]), (training.LONGEST, [True, False])):
        monkeypatch.setattr(
            training, "oracle_lengths",
            lambda text, length=length: np.array([d for d, _ in training.iterations(
                text, lambda at: length)]),
        )  # fmt: skip
        assert verdicts("disco-figure-3") == held


def test_policies_in_the_contrary_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order = ["oracle", "disco", "static", "heuristic", "plain"]
    study = disco_latency.Study("demo", disco_latency._SMALL_COSTS[-1], "conformity")

    def told(seconds: Sequence[float], f1: float) -> list[bool]:
        by_text = {name: [(10 * each, 10), (11 * each, 11)]
                   for name, each in zip(order, seconds, strict=True)}  # fmt: skip
        found = SimpleNamespace(
            by_text=by_text, expected=([(8, 10), (7, 10)], [(2, 10), (3, 10)]), static_lengths=(3,),
            heuristic_s=1.0, static_5_s=1.0, static_s=1.0, disco_s=1.0, oracle_s=1.0,
            static_f1=0.5, disco_f1=f1, always_f1=0.5,
        )  # fmt: skip
        monkeypatch.setattr(disco_latency, "_evaluated", lambda lab: {study: found})
        return [*verdicts("disco-table-1"), *verdicts("disco-table-4")]

    assert told([1, 2, 3, 4, 5], 0.6) == [True] * 6
    for seconds in ([5, 4, 3, 2, 1], [3, 3, 3, 3, 3]):
        assert told(seconds, 0.5) == [True, False, False, False, True, False]
