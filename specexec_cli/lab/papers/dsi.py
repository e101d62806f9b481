"""DSI (arXiv:2405.14105): speculation over several devices, in virtual time.

The orchestrator is that of --method dsi, but its models are fakes that wait on a virtual clock. So
all results are exact, and equal on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from specexec_cli.lab.papers.registry import Claim, Finding, Table, recipe

if TYPE_CHECKING:
    from specexec_cli.lab.papers.lab import Lab
    from specexec_cli.lab.simulate.clock import Latencies, VirtualWorkers
    from specexec_cli.lab.simulate.heatmap import Heatmap

_ENOUGH = 64  # target servers, so many that no task ever waits
_TOKENS = 50  # as in the paper's own simulation


@recipe(
    "dsi-algorithm-1",
    printed="m models; the target's tokens; of the drafters that sampled the verifier's token the "
    "first goes on, all others end (lines 7 to 11)",
    models=False,
)
def algorithm_1(lab: Lab) -> Finding:
    """A hand-worked example of two drafters, one of which is wrong once; then random drafters."""
    wrong, right = [True, False, True, True], [True] * 4
    alone, both = _run([(wrong, 1)], 4, 3), _run([(wrong, 1), (right, 1)], 4, 3)
    rows = [["one drafter, wrong at the second token", "8", f"{alone.now():g}"],
            ["and a second one, right everywhere", "6", f"{both.now():g}"]]  # fmt: skip
    numbers = random.Random(lab.seed)
    slower = 0
    count = 400 if lab.full else 20
    for _ in range(count):
        drafters = [
            ([numbers.random() < 0.7 for _ in range(_TOKENS)], numbers.randint(1, 6))
            for _ in range(numbers.randint(2, 3))
        ]
        first = drafters[0][1]
        drafters = [(accepted, max(first, cost)) for accepted, cost in drafters]
        target = numbers.randint(first, 40)
        seconds = _run(drafters, _TOKENS, target).now()
        slower += seconds > _run(drafters[:1], _TOKENS, target).now()
    return Finding(
        tables=[Table("Four tokens; a draft takes 1, the target 3", ["", "by hand", "here"], rows)],
        claims=[
            Claim("the times are those worked by hand from the text",
                  (alone.now(), both.now()) == (8, 6)),
            Claim("the tokens are the target's, and further drafters cost no time "
                  f"({slower} of {count} texts take longer)", slower == 0),
        ],
        notes=["a drafter continues its own drafts; that each of its tokens starts every other "
               "drafter too (line 6) is not done: it takes m^k processors"],
    )  # fmt: skip


def _run(
    drafters: Sequence[tuple[Sequence[bool], float]], tokens: int, target_s: float
) -> VirtualWorkers:
    """Runs a text with drafters that are right at given positions, each with its own latency.

    Raises:
        AssertionError: the tokens are not the target's.
    """
    from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
    from specexec_cli.lab.simulate.clock import Latencies, VirtualWorkers

    def proposes(accepted: Sequence[bool]) -> Callable[[Sequence[int], int], int]:
        return lambda sequence, position: position if accepted[position - 1] else -1

    (accepted, draft_s), *more = drafters
    workers = VirtualWorkers(
        Latencies(target_s=target_s, draft_s=draft_s), lambda sequence, position: position,
        proposes(accepted), _ENOUGH, [(proposes(others), seconds) for others, seconds in more],
    )  # fmt: skip
    commits = Orchestrator(workers, DsiConfig(lookahead=1)).generate([0], tokens)
    text = [token for commit in commits for token in commit.tokens]
    assert text == list(range(1, tokens + 1)), "DSI must commit the target's tokens"
    return workers


@recipe(
    "dsi-theorems",
    printed="theorems 1 and 2: never slower than no speculation, nor, in expectation, than SI; "
    "proposition 1: at most t1 p (N - 1) + t2 ((1 - p)(N - 1) + 1)",
    models=False,
)
def theorems(lab: Lab) -> Finding:
    """Checks the theorems on random texts, one by one, and their means against the bound.

    Theorem 2 is checked at lookahead 1, and at the longest lookahead for which drafting takes no
    longer than a target pass.
    """
    from specexec_cli.lab.simulate.clock import Latencies
    from specexec_cli.lab.simulate.methods import (
        FakePair,
        dsi_bound_s,
        run_autoregressive,
        run_dsi,
    )

    repeats = 1000 if lab.full else 40
    rows, over_plain, over_bound = [], 0, 0
    over_si: list[bool] = []
    ratios: list[float] = []
    for draft, target, acceptance in ((1, 10, 0.6), (1, 10, 0.9), (3, 10, 0.8), (9, 10, 0.5)):
        latencies = Latencies(target_s=target, draft_s=draft)
        pair = FakePair(latencies=latencies, acceptance=acceptance)
        times = []
        for repeat in range(repeats):
            accepted = pair.sample(_TOKENS, lab.seed + repeat)
            seconds = run_dsi(latencies, accepted, 1, _ENOUGH).seconds
            right = sum(accepted[:-1])
            times.append(seconds)
            over_plain += seconds > run_autoregressive(latencies, _TOKENS).seconds
            over_si += [_slower_than_si(latencies, accepted, k) for k in {1, target // draft}]
            over_bound += seconds > draft * right + target * (_TOKENS - right)
        mean = sum(times) / repeats
        bound = dsi_bound_s(target, draft, acceptance, _TOKENS)
        ratios.append(mean / bound)
        rows.append([f"{draft}", f"{target}", f"{acceptance:g}", f"{target * _TOKENS}",
                     f"{bound:.1f}", f"{mean:.1f}"])  # fmt: skip
    beyond = _beyond_theorem_2(lab.seed, 10 * repeats)
    return Finding(
        tables=[Table(f"Time units of {_TOKENS} tokens, lookahead 1",
                      ["t1", "t2", "p", "t2 N", "proposition 1", "DSI, mean"], rows)],
        claims=[
            Claim(f"DSI is never slower than no speculation (theorem 1: {over_plain} texts are)",
                  over_plain == 0),
            Claim("DSI is never slower than SI where the drafts of a lookahead take no longer than "
                  f"a target pass (theorem 2: {sum(over_si)} of {len(over_si)} texts are)",
                  not any(over_si)),
            Claim(f"no text takes longer than proposition 1 allows ({over_bound} do)",
                  over_bound == 0),
            Claim("DSI takes what proposition 1 allows on average "
                  f"({min(ratios):.3f} to {max(ratios):.3f} of it)",
                  all(abs(ratio - 1) < 0.05 for ratio in ratios)),
        ],
        notes=["t1, t2: a pass of the drafter and of the target; p: the acceptance rate",
               "where drafts of a lookahead take longer than a target pass, which theorem 2 does "
               f"not exclude, DSI is slower than SI in {beyond} of {10 * repeats} random texts"],
    )  # fmt: skip


def _slower_than_si(latencies: Latencies, accepted: Sequence[bool], lookahead: int) -> bool:
    """Whether DSI takes longer for a text than SI at the same lookahead."""
    from specexec_cli.lab.simulate.methods import run_dsi, run_speculative

    seconds = run_dsi(latencies, accepted, lookahead, _ENOUGH).seconds
    return seconds > run_speculative(latencies, accepted, lookahead).seconds


def _beyond_theorem_2(seed: int, texts: int) -> int:
    """Counts random texts with SI faster, where drafting a lookahead takes longer than a pass."""
    from specexec_cli.lab.simulate.clock import Latencies

    numbers = random.Random(seed)
    slower = 0
    for _ in range(texts):
        draft, lookahead = numbers.randint(2, 10), numbers.randint(2, 12)
        latencies = Latencies(target_s=numbers.randint(draft, lookahead * draft - 1), draft_s=draft)
        rate = numbers.choice((0.3, 0.6, 0.9))
        accepted = [numbers.random() < rate for _ in range(numbers.randint(2, 40))]
        slower += _slower_than_si(latencies, accepted, lookahead)
    return slower


def _heatmaps(lab: Lab, lookahead: int | None, peak: float | None) -> Finding:
    from specexec_cli.lab.simulate.heatmap import PANELS, drafting_dsi_s, drawn, simulated_heatmap

    points, servers = (100 if lab.full else 20), 1000
    heatmap: Heatmap = simulated_heatmap(points, servers, lookahead)
    lowest = {panel: min(map(min, heatmap.speedups[panel])) for panel in PANELS}
    # the panel shows plain decoding where that is faster, so it is never below 1
    lowest[PANELS[2]] = min(
        1.0 / drafting_dsi_s(fraction, acceptance, servers)
        for fraction in heatmap.draft_fractions
        for acceptance in heatmap.acceptances
    )
    rows = [[panel, f"{lowest[panel]:.2f}x", f"{heatmap.maximum(panel):.2f}x"] for panel in PANELS]
    claims = [
        Claim(f"SI is slower than plain decoding somewhere ({lowest[PANELS[0]]:.2f}x)",
              lowest[PANELS[0]] < 1.0),
        *(Claim(f"{panel} is never below 1 ({lowest[panel]:.2f}x)", lowest[panel] >= 1.0 - 1e-9)
          for panel in PANELS[1:]),
    ]  # fmt: skip
    if peak is not None:
        most = heatmap.maximum(PANELS[3])
        claims.append(
            Claim(
                f"DSI is up to {peak}x faster than the better of both ({most:.2f}x)",
                peak - 0.1 < most < peak + 0.05,
            )
        )
    return Finding(
        tables=[Table(f"Speedups on {points} x {points + 1} points", ["", "lowest", "highest"],
                      rows)],
        claims=claims,
        notes=["expectations in closed form, where the paper averages five runs of SI"],
        figures={"": lambda: drawn(heatmap, servers, lookahead)},
    )  # fmt: skip


# name, SI's lookahead at every point (None: the best one), greatest speedup over the better of
# both, and the paper's statement
_HEATMAPS: Sequence[tuple[str, int | None, float | None, str]] = (
    ("figure-1", None, 1.6,
     "SI slower than plain decoding with slow or inaccurate drafters; DSI never slower than "
     "either, and up to 1.6x over the better of both"),
    ("figure-6", 5, None,
     "the same with a lookahead of 5 for SI: smooth, and DSI never slower than either"),
)  # fmt: skip
for _name, _lookahead, _peak, _printed in _HEATMAPS:
    recipe(f"dsi-{_name}", printed=_printed, models=False)(
        partial(_heatmaps, lookahead=_lookahead, peak=_peak)
    )


@recipe(
    "dsi-table-1",
    printed="DSI 1.29x to 1.92x over SI on ten pairs, lookaheads 1, 5 and 10",
    models=False,
)
def table_1(lab: Lab) -> Finding:
    """The paper's rows, beside DSI's simulated gain and the counts of the published simulation."""
    from specexec_cli.lab.simulate.table import (
        PUBLISHED,
        WHY,
        geometric_mean,
        simulate_row,
        spearman,
        within,
    )

    rows = [simulate_row(row, 200 if lab.full else 10, lab.seed) for row in PUBLISHED]
    paper = [row.published.speedup for row in rows]
    columns = {
        "exact": [row.exact for row in rows],
        "accounting": [row.accounting for row in rows],
        "restarts": [row.restarts for row in rows],
    }
    cells = [
        [row.published.target, row.published.dataset, f"{paper[at]:.2f}",
         *(f"{values[at]:.2f}" for values in columns.values())]
        for at, row in enumerate(rows)
    ]  # fmt: skip
    all_columns = [paper, *columns.values()]
    cells += [
        ["geometric mean", "", *(f"{geometric_mean(column):.2f}" for column in all_columns)],
        ["Spearman", "", *(f"{spearman(column, paper):.2f}" for column in all_columns)],
        ["within 10 %", "", *(str(within(column, paper)) for column in all_columns)],
    ]
    slowest = min(min(values) for values in columns.values())
    return Finding(
        tables=[Table("DSI over SI", ["target", "dataset", "printed", *columns], cells)],
        claims=[Claim(f"DSI is faster than SI on every row ({slowest:.2f}x at least)",
                      slowest > 1.0)],
        notes=[" ".join(WHY.split("\n")), "the rows are not reproduced one by one"],
    )  # fmt: skip
