"""The simulator's numbers: published results reproduced, tables, heatmaps, streamed targets."""

from __future__ import annotations

import itertools
import math
import random
import sys
from dataclasses import replace

import pytest
from dsi_toys import balanced

from specexec_cli.dsi.closed_forms import dsi_s, servers_needed
from specexec_cli.errors import ConfigError
from specexec_cli.lab.simulate import published
from specexec_cli.lab.simulate.clock import Latencies
from specexec_cli.lab.simulate.heatmap import PANELS, best_dsi_s, best_si_s, draw, simulated_heatmap
from specexec_cli.lab.simulate.methods import FakePair, run_dsi
from specexec_cli.lab.simulate.offload import Scenario, best_tree, compare, verdict
from specexec_cli.lab.simulate.table import (
    PUBLISHED,
    SimulatedRow,
    geometric_mean,
    simulate_row,
    spearman,
    within,
)


@pytest.fixture(scope="module")
def rows() -> list[SimulatedRow]:
    return [simulate_row(row, repeats=40, seed=0) for row in PUBLISHED]


def test_dsi_is_faster_than_si_on_every_published_pair(rows):
    """DSI's table 1, lookaheads 1, 5 and 10 for both methods; whatever the accounting."""
    assert len(rows) == 10
    assert geometric_mean([r.published.speedup for r in rows]) == pytest.approx(1.51, abs=0.005)
    assert geometric_mean([r.exact for r in rows]) == pytest.approx(1.227, abs=0.02)
    assert all(min(r.exact, r.accounting, r.restarts) > 1 for r in rows)


def test_the_published_accounting_and_its_restarts_explain_seven_rows(rows):
    """Without restarts five of ten, and not all of those seven; the rows are not reproduced."""
    paper = [r.published.speedup for r in rows]
    assert geometric_mean([r.accounting for r in rows]) == pytest.approx(1.66, abs=0.03)
    assert within([r.exact for r in rows], paper) <= 2
    assert within([r.accounting for r in rows], paper) == 5
    far = [r.published for r in rows if abs(r.restarts / r.published.speedup - 1) > 0.1]
    assert {(p.target, p.dataset) for p in far} == {
        ("Starcoder-15B", "HumanEval"), ("Starcoder-15B", "MBPP"), ("Vicuna-7B", "Alpaca"),
    }  # fmt: skip


COSTS = published.Accounting(
    target_s=10.0, draft_s=1.0, first_target_s=10.0, si_restart_s=100.0, dsi_restart_s=1000.0
)


def test_published_si_by_hand():
    """Restarts with 3, 0 and 9 right drafts of 5 tokens, lookahead 2.

    A pass, and two iterations of two drafts and a pass; a pass and one iteration; 3 + 0 + 9 is
    beyond 5: a pass. 10 + 2 * 12 + 10 + 12 + 10.
    """
    assert published.si_s(COSTS, [3, 0, 9], 5, 2) == 3 * 100 + 66


def test_published_dsi_by_hand():
    """The same: the pass over 4 drafts begins after 4, that over 2 after 2, and the last at once.

    4 + 10, 2 + 10, 10; one server, which takes the newest first, runs the pass over no draft, then
    the newest of those that came meanwhile: 20, 20, 10.
    """
    assert published.dsi_s(COSTS, [3, 0, 9], 5, 2, servers=9) == 3 * 1000 + 36
    assert published.dsi_s(COSTS, [3, 0, 9], 5, 2, servers=1) == 3 * 1000 + 50


def test_published_first_passes_take_longer_once_a_server():
    """TTFT 30: SI pays 20 more once; of nine servers six run a first pass in the first restart,
    of which the one over 4 drafts ends it, and the second restart waits for none of the others."""
    costs = replace(COSTS, first_target_s=30.0)
    assert published.si_s(costs, [3, 0, 9], 5, 2) == 3 * 100 + 86
    assert published.dsi_s(costs, [3, 0, 9], 5, 2, servers=9) == 3 * 1000 + 34 + 12 + 10


def test_right_drafts_are_geometric_up_to_twenty():
    drawn = published.right_drafts(0.5, 20_000, random.Random(0))
    assert sum(drawn) == pytest.approx(len(drawn), rel=0.05), "a / (1 - a)"
    assert max(published.right_drafts(0.99, 2_000, random.Random(0))) == published.MOST_RIGHT


def test_spearman_by_hand():
    assert spearman([1.0, 2.0, 3.0], [5.0, 6.0, 9.0]) == pytest.approx(1.0)
    assert spearman([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    # ranks 1, 2.5, 2.5 and 1, 2, 3: 1.5 / sqrt(1.5 * 2)
    assert spearman([1.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(1.5 / math.sqrt(3))


def test_all_methods_see_the_same_acceptances():
    pair = FakePair(latencies=Latencies(target_s=1.0, draft_s=0.1), acceptance=0.3)
    assert pair.sample(50, 4) == pair.sample(60, 4)[:50]
    assert sum(pair.sample(10_000, 4)) == pytest.approx(3000, abs=200)


@pytest.mark.parametrize(
    "bad",
    [
        {"acceptance": 1.1, "latencies": Latencies(target_s=1.0, draft_s=1.0)},
        {"acceptance": 0.5, "latencies": Latencies(target_s=0.0, draft_s=1.0)},
        {"acceptance": 0.5, "latencies": Latencies(target_s=1.0, draft_s=-1.0)},
    ],
)
def test_impossible_pairs_are_refused(bad):
    with pytest.raises(ConfigError):
        FakePair(**bad)


def test_the_heatmap_peaks_where_the_papers_do():
    heatmap = simulated_heatmap(points=20, servers=7)
    assert heatmap.maximum("DSI / better of both") == pytest.approx(1.55, abs=0.03)
    lowest = {panel: min(map(min, heatmap.speedups[panel])) for panel in PANELS}
    assert lowest["SI / non-SI"] < 0.6, "SI loses with slow or inaccurate drafters"
    for panel in PANELS[1:]:
        assert lowest[panel] >= 1.0, f"{panel}: DSI never loses"


@pytest.mark.parametrize(("fraction", "acceptance"), [(0.1, 0.9), (0.25, 0.5), (0.5, 0.8)])
def test_cells_of_the_heatmap_agree_with_the_orchestrator(fraction, acceptance):
    """The closed forms' best lookahead, run."""
    latencies, accepted = Latencies(target_s=1.0, draft_s=fraction), balanced(acceptance, 400)
    best = min(
        (k for k in range(1, 11) if k * fraction <= 1 and servers_needed(1.0, fraction, k) <= 7),
        key=lambda k: dsi_s(1.0, fraction, acceptance, k),
    )
    seconds = run_dsi(latencies, accepted, best, 8).seconds / len(accepted)
    assert seconds == pytest.approx(best_dsi_s(fraction, acceptance, 7), rel=0.01)


def test_a_fixed_lookahead_and_a_perfect_drafter():
    """DSI, figure 6: SI runs with a lookahead of 5; (5 c + 1) / 6 where all is accepted."""
    heatmap = simulated_heatmap(points=10, servers=1000, lookahead=5)
    assert heatmap.acceptances[-1] == 1.0
    perfect = heatmap.speedups["SI / non-SI"][-1]
    assert perfect[0] == pytest.approx(6 / 1.5)
    assert perfect[-1] == pytest.approx(1.0)
    # a drafter that is never right: the five drafts are lost, and DSI is plain decoding
    assert heatmap.speedups["SI / non-SI"][0][0] == pytest.approx(1 / 1.5)
    assert heatmap.speedups["DSI / non-SI"][0] == pytest.approx([1.0] * 10)
    assert heatmap.speedups["DSI / non-SI"][-1][0] == pytest.approx(10.0), "a draft step a token"


def test_best_si_is_the_best_of_all_lookaheads():
    assert best_si_s(0.05, 0.0) == pytest.approx(1.05)
    assert best_si_s(1.0, 0.5) == pytest.approx(2 / 1.5)


def test_the_heatmap_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the optional extra 'plots' is not installed")
    path = tmp_path / "map.png"
    draw(simulated_heatmap(points=4, servers=7), path, 7)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ConfigError, match=r"map\.png: No such file[a-z ]*$"):
        draw(simulated_heatmap(points=4, servers=7), tmp_path / "no" / "map.png", 7)


def test_without_matplotlib_the_mend_is_named(tmp_path, monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib.*`json`"):
        draw(simulated_heatmap(points=2, servers=7), tmp_path / "map.png", 7)


@pytest.mark.parametrize("budget", [1, 2, 5, 12])
@pytest.mark.parametrize("acceptance", [0.35, 0.7])
def test_best_tree_is_the_best_of_all_trees(budget, acceptance):
    """Against the products of every path of up to 12 ranks below 12."""
    products = sorted(
        (
            acceptance**depth * (1 - acceptance) ** (sum(ranks))
            for depth in range(1, 7)
            for ranks in itertools.product(range(5), repeat=depth)
        ),
        reverse=True,
    )
    rate, depth = best_tree(acceptance, budget)
    assert rate == pytest.approx(1 + sum(products[:budget]))
    assert 1 <= depth <= budget


def scenario(**changes: object) -> Scenario:
    given = {
        "target_bytes": 35e9, "link_bytes_per_s": 25e9, "memory_bytes_per_s": 1e12,
        "device_bytes": 24e9, "devices": 4, "draft_s": 0.012, "acceptance": 0.7, "row_s": 1e-4,
    }  # fmt: skip
    return Scenario(**{**given, **changes})  # type: ignore[arg-type]


def test_one_streamed_target_wins_where_replicas_do_not_fit():
    estimates = compare(scenario(device_bytes=8e9), (16, 256), 32)
    assert verdict(estimates).startswith("one streamed target wins: streamed, tree of 256")


def test_resident_replicas_win_where_they_fit():
    estimates = compare(scenario(), (16, 256), 32)
    assert verdict(estimates).startswith("DSI, 2 resident replicas wins")
    by_name = {e.name: e for e in estimates}
    assert by_name["resident, plain speculation"].devices == 2


def test_a_shared_link_makes_streamed_replicas_as_slow_as_their_number():
    alone, shared = (
        {e.name: e for e in compare(scenario(shared_link=flag), (16,), 32)}
        for flag in (False, True)
    )
    name = "DSI, streamed replicas"
    assert shared[name].pass_s == pytest.approx(4 * alone[name].pass_s)


def test_a_pass_takes_its_slower_part():
    assert scenario().streamed_pass_s(1) == pytest.approx(1.4)
    assert scenario().streamed_pass_s(20_000) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "bad", [{"acceptance": 1.0}, {"devices": 0}, {"target_bytes": 0.0}, {"draft_s": math.nan}]
)
def test_impossible_scenarios_are_refused(bad):
    with pytest.raises(ConfigError):
        scenario(**bad)
