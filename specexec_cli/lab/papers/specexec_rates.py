"""SpecExec (arXiv:2406.02532): tokens per target pass over draft budgets, beside SpecInfer.

Figures 1, 3, 4 and 7 and tables 1 to 4 show the same measurement on different prompts, models and
machines. The paper prints neither depth nor batch. The authors' program (run_exp.py of
yandex-research/specexec) defaults to 128 nodes a round and a depth of 32; the results in its README
have 128 and 256. Both are measured at _COMPARED nodes. At every budget SpecExec has paths of at
most _DEPTH tokens, which bound the tokens per pass (the paper prints up to 21.58), and a batch that
fills the budget in half of algorithm 2's rounds.

SpecInfer is the authors' baseline: stems drawn from the draft model's plain softmax, in the nine
shapes that their README sweeps. For a number of nodes the best of the shapes that fit is taken,
which favours it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from specexec_cli.config import BenchMethod, SamplingConfig, TreeConfig
from specexec_cli.lab.bench.cases import Case
from specexec_cli.lab.papers.registry import Claim, Finding, Table, recipe

if TYPE_CHECKING:
    from specexec_cli.lab.papers.lab import Difference, Lab, Rate

PAPER, SPECINFER, OURS = "specexec-paper", "specinfer", "specexec"
_AUTHORS = "specexec-paper, the authors' D and B"
BUDGETS = (16, 64, 256, 1024, 2048)
_SMALL_BUDGETS = (4, 16, 64, 256)
_DEPTH, _SMALL_DEPTH = 64, 16
_SIDES = (8, 16, 32)  # SpecInfer's numbers of stems, and their lengths
_SMALL_SHAPES = ((2, 2), (4, 4), (8, 8), (16, 16))
_COMPARED = 256  # nodes at which the authors' B and D, and the default method, are measured too
_AUTHORS_BATCH, _AUTHORS_DEPTHS = 128, (32, 256)
_TOKENS, _SMALL_TOKENS = 128, 16  # section 5.3: "32+ tokens per prompt"
_SMALL_PROMPTS = 10

AVERAGES = (
    "micro: all tokens over all passes; macro: the mean over prompts, which the authors' program "
    "prints as gen_rate, the first pass of each text left out"
)

# of one dataset and temperature: (method or label, tree) -> rate
Trees = Mapping[tuple[str, TreeConfig], "Rate"]
Rates = Mapping[tuple[str, float], Trees]  # (dataset, temperature) -> its trees


def tree(budget: int, *, full: bool) -> TreeConfig:
    """SpecExec's tree for a budget, in the full or the small form."""
    depth = min(_DEPTH if full else _SMALL_DEPTH, budget)
    return TreeConfig(
        budget=budget, max_depth=depth, batch=max(1, -(-2 * budget // max(depth - 1, 1)))
    )


def stems(count: int, length: int) -> TreeConfig:
    """SpecInfer's tree: paths from the root, all of one length."""
    return TreeConfig(budget=count * length, max_depth=length)


def sampling(temperature: float, seed: int) -> SamplingConfig:
    """The paper's sampling: at temperature 0.6, top_p is 0.9 (section 5.2)."""
    return SamplingConfig(
        temperature=temperature, top_p=0.9 if temperature else 1.0, seed=seed
    )  # fmt: skip


def _trees(full: bool) -> list[tuple[str, BenchMethod, TreeConfig]]:
    """What is measured: label, method and tree."""
    found: list[tuple[str, BenchMethod, TreeConfig]] = [
        (PAPER, PAPER, tree(budget, full=full)) for budget in (BUDGETS if full else _SMALL_BUDGETS)
    ]
    shapes = product(_SIDES, _SIDES) if full else _SMALL_SHAPES
    found += [(SPECINFER, SPECINFER, stems(count, length)) for count, length in shapes]
    if full:
        authors = (TreeConfig(budget=_COMPARED, max_depth=depth, batch=_AUTHORS_BATCH)
                   for depth in _AUTHORS_DEPTHS)  # fmt: skip
        found += [(_AUTHORS, PAPER, one) for one in authors]
    return [*found, (OURS, OURS, tree(_COMPARED, full=full))]


def measured(lab: Lab, names: Sequence[str], temperatures: Sequence[float]) -> Rates:
    """Measures tokens per pass for every combination.

    The small form uses only built-in texts to continue. Both models know the built-in chats by
    heart, so these would show no difference.
    """
    from specexec_cli.lab.papers.lab import rate

    sets = [
        lab.dataset(name, chat=False, small=_SMALL_PROMPTS)
        for name in (names if lab.full else ("demo",))
    ]
    tokens = lab.tokens(_TOKENS, _SMALL_TOKENS)
    lab.session(sets, tokens)
    wanted = {
        (temperature, label, shape): Case(method, shape, sampling(temperature, lab.seed), tokens)
        for temperature in temperatures
        for label, method, shape in _trees(lab.full)
    }
    found: dict[tuple[str, float], dict[tuple[str, TreeConfig], Rate]] = {}
    for data in sets:
        rows = lab.rows([*wanted.values()], data)
        for (temperature, label, shape), case in wanted.items():
            one = found.setdefault((data.name, temperature), {})
            one[label, shape] = rate(rows[case])
    return found


def by_budget(rates: Trees) -> dict[int, Rate]:
    """SpecExec's rates."""
    return {shape.budget: one for (label, shape), one in rates.items() if label == PAPER}


def best_stems(rates: Trees, nodes: int) -> tuple[TreeConfig, Rate] | None:
    """SpecInfer's shape with the highest rate, of those of at most so many nodes."""
    fitting = [
        (one.micro, shape, one)
        for (label, shape), one in rates.items()
        if label == SPECINFER and shape.budget <= nodes
    ]
    if not fitting:
        return None
    _, shape, one = max(fitting, key=lambda each: each[0])
    return shape, one


def _named(shape: TreeConfig) -> str:
    return f"{shape.budget // shape.max_depth} x {shape.max_depth}"


def _against_specinfer(rates: Rates) -> Table:
    rows = []
    for (name, t), trees in rates.items():
        for nodes, one in by_budget(trees).items():
            cells = [name, f"{t:g}", str(nodes), str(one)]
            best = best_stems(trees, nodes)
            if best is None:
                rows.append([*cells, "no shape is so small", "-", "-", "-", str(len(one.counts))])
                continue
            shape, other = best
            rows.append(
                [*cells, str(other), _named(shape), str(one.above(other)),
                 str(one.macro_above(other)), f"{len(one.counts)}, {len(other.counts)}"]
            )  # fmt: skip
    header = ["prompts", "temp", "nodes", PAPER, "SpecInfer's best", "stems x length",
              "difference, micro", "macro", "numbers of prompts"]  # fmt: skip
    return Table("Committed tokens per target pass, with standard errors", header, rows)


def _shapes(rates: Rates) -> Table:
    rows = [
        [name, f"{t:g}", _named(shape), str(shape.budget), str(one), f"{one.nodes:.0f}"]
        for (name, t), trees in rates.items()
        for (label, shape), one in trees.items()
        if label == SPECINFER
    ]
    header = ["prompts", "temp", "stems x length", "nodes", "rate", "nodes drawn"]
    return Table("SpecInfer's shapes", header, rows)


def _settings(rates: Rates) -> Table:
    """The authors' depths and batch, and the default method, beside SpecExec's own tree."""
    rows = []
    for (name, t), trees in rates.items():
        base = next((one for (label, shape), one in trees.items()
                     if label == PAPER and shape.budget == _COMPARED), None)  # fmt: skip
        for (label, shape), one in trees.items():
            if base is not None and label != SPECINFER and shape.budget == _COMPARED:
                more = "-" if one is base else f"{one.above(base)}, {one.macro_above(base)}"
                rows.append([name, f"{t:g}", label, str(shape.max_depth), str(shape.batch),
                             str(one), more])  # fmt: skip
    header = ["prompts", "temp", "method", "D", "B", "rate", "above the first, micro and macro"]
    return Table(f"SpecExec's trees of {_COMPARED} nodes", header, rows)


def _lines(trees: Trees) -> dict[str, Any]:
    best = {nodes: found[1] for nodes in _budgets(trees, SPECINFER)
            if (found := best_stems(trees, nodes))}  # fmt: skip
    return {
        name: ([*line], [one.micro for one in line.values()], [one.error for one in line.values()])
        for name, line in ((PAPER, by_budget(trees)), ("SpecInfer's best shape", best))
    }


def _budgets(trees: Trees, label: str) -> list[int]:
    return sorted({shape.budget for each, shape in trees if each == label})


def _figures(rates: Rates) -> dict[str, Any]:
    from specexec_cli.lab.papers.draw import curves

    def drawn(name: str, temperature: float) -> Any:
        title = f"{name}, temperature {temperature:g}"
        return lambda: curves(
            title, "budget: most draft tokens per pass", "committed tokens per target pass, micro",
            _lines(rates[name, temperature]), doubling=True,
        )  # fmt: skip

    return {f"{name}-t{t:g}": drawn(name, t) for name, t in rates}


def grows(rates: Rates, *, full: bool = True) -> list[Claim]:
    """Claims: SpecExec gains from more draft tokens, and ends ahead of SpecInfer.

    A direction is claimed where the difference of micro over common prompts is more than two of its
    standard errors. Above temperature 0 the small form has too few prompts to show the second one.
    """
    claims = []
    for (name, t), trees in rates.items():
        line = by_budget(trees)
        fewest, most = min(line), max(line)
        where = f"{name}, temperature {t:g}"
        gain = line[most].above(line[fewest])
        claims.append(
            Claim(f"SpecExec accepts more with {most} draft tokens than with {fewest} ({where}: "
                  f"{gain})", gain.shown)
        )  # fmt: skip
        best = best_stems(trees, most)
        if best is not None and (full or t == 0.0):
            ahead = line[most].above(best[1])
            claims.append(
                Claim(f"SpecExec with {most} is ahead of SpecInfer's best shape ({where}: {ahead})",
                      ahead.shown)
            )  # fmt: skip
    return claims


def cooler(rates: Rates) -> dict[str, Difference]:
    """How much more SpecExec accepts at temperature 0 with most nodes, by prompts (section 5.2)."""
    found = {}
    for (name, t), trees in rates.items():
        if t > 0.0 and (name, 0.0) in rates:
            most = max(by_budget(trees))
            greedy = by_budget(rates[name, 0.0])[most]
            found[f"{name}, {most} nodes, against temperature {t:g}"] = greedy.above(
                by_budget(trees)[most]
            )
    return found


def wider(rates: Rates) -> dict[str, Difference]:
    """How much larger SpecExec's margin over SpecInfer is on MT-Bench than on C4 (section 5.2)."""
    from specexec_cli.lab.papers.lab import Difference

    found = {}
    for (name, t), trees in rates.items():
        other = rates.get(("c4", t))
        if name == "mt-bench" and other is not None:
            margins = []
            for each in (trees, other):
                most = max(by_budget(each))
                best = best_stems(each, most)
                assert best is not None, "all shapes fit into the most nodes"
                margins.append(by_budget(each)[most].above(best[1]))
            here, there = margins  # of different prompts, so their errors are independent
            found[f"temperature {t:g}"] = Difference(
                here.more - there.more, math.hypot(here.error, there.error)
            )
    return found


def _compared(lab: Lab, names: Sequence[str], temperatures: Sequence[float]) -> Finding:
    rates = measured(lab, names, temperatures)
    others = {f"SpecExec accepts more at temperature 0 ({where}: {more})": more
              for where, more in cooler(rates).items()}  # fmt: skip
    others |= {f"SpecExec's margin is larger on MT-Bench than on C4 ({where}: {more})": more
               for where, more in wider(rates).items()}  # fmt: skip
    claims, shown = grows(rates, full=lab.full), []
    for text, more in others.items():
        if lab.full:
            claims.append(Claim(text, more.shown))
        else:  # too few prompts
            shown.append(text if more.shown else f"not shown: {text}")
    return Finding(
        tables=[_against_specinfer(rates), _settings(rates), _shapes(rates)],
        claims=claims, figures=_figures(rates),
        notes=[*shown,
               f"texts of at most {lab.tokens(_TOKENS, _SMALL_TOKENS)} tokens; a text's last pass "
               "counts as one, though its end may have cut it short", AVERAGES,
               "SpecInfer draws stems from the draft model's plain softmax; its best shape is that "
               "of the highest micro rate of those that fit into the nodes",
               "a difference is over the prompts of both, its error of the pairs"],
    )  # fmt: skip


# name, datasets, temperatures, and the paper's statement
_COMPARISONS: Sequence[tuple[str, Sequence[str], Sequence[float], str]] = (
    ("figure-3", ["mt-bench"], (0.6, 0.0),
     "figures 1 and 7 (left) and 3: equal at small budgets, then SpecInfer ends near 10 tokens and "
     "SpecExec goes on (MT-Bench, t = 0.6 and 0)"),
    ("figure-4", ["c4"], (0.6, 0.0), "the same of base models on C4, with a smaller margin"),
    ("section-5.2", ["oasst", "mt-bench", "c4", "wikitext2"], (0.6,),
     "on par at small budgets, then SpecExec outscales SpecInfer, by more on MT-Bench than on C4"),
    ("table-1", ["oasst", "mt-bench"], (0.6, 0.0),
     "OASST: SpecExec 20.60 tokens a pass at 2048 (t = 0: 18.8 at 1024), SpecInfer 8.41 (7.86) at "
     "1024; MT-Bench with Llama 3: 18.16 (21.58)"),
    ("table-2", ["c4", "wikitext2"], (0.6, 0.0),
     "C4: SpecExec 12.9 tokens a pass (t = 0: 16.1), SpecInfer 6.48 (4.78); WikiText-2: 9.57 "
     "(11.74) and 4.69 (3.71)"),
)  # fmt: skip
for _name, _sets, _temperatures, _printed in _COMPARISONS:
    recipe(f"specexec-{_name}", printed=_printed)(
        partial(_compared, names=_sets, temperatures=_temperatures)
    )
