"""SpecExec (arXiv:2406.02532): tokens per target pass over draft budgets, beside SpecInfer.

Figures 1, 3, 4 and 7 and tables 1 to 4 show the same measurement on different prompts, models and
machines. The paper prints neither depth nor batch. The authors' program (run_exp.py of
yandex-research/specexec) defaults to 128 nodes a round and a depth of 32; the results in its README
have 128 and 256. Here both methods have paths of at most _DEPTH tokens, which bound the tokens per
pass (the paper prints up to 21.58). The batch lets algorithm 2 fill the budget in half of its
rounds. SpecInfer has the shape of the authors' code: several stems from the root, at least _STEMS
if the budget has room.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.lab.bench.cases import Case
from specexec_cli.lab.papers.registry import Claim, Finding, Table, recipe

if TYPE_CHECKING:
    from specexec_cli.lab.papers.lab import Lab, Rate

PAPER, SPECINFER = "specexec-paper", "specinfer"
BUDGETS = (16, 64, 256, 1024, 2048)
_SMALL_BUDGETS = (4, 64)
_DEPTH, _SMALL_DEPTH = 64, 16
_STEMS = 2
_TOKENS, _SMALL_TOKENS = 128, 16  # section 5.3: "32+ tokens per prompt"

AVERAGES = (
    "micro: all tokens over all passes; macro: the mean over prompts, which the authors' program "
    "prints as gen_rate, the first pass of each text left out"
)

# (prompts, temperature, method, budget) -> rate
Rates = Mapping[tuple[str, float, str, int], "Rate"]


def tree(budget: int, method: str, *, full: bool) -> TreeConfig:
    """A method's tree for a budget, in the full or the small form."""
    longest = budget if method == PAPER else max(budget // _STEMS, 1)
    depth = min(_DEPTH if full else _SMALL_DEPTH, longest)
    return TreeConfig(
        budget=budget, max_depth=depth, batch=max(1, -(-2 * budget // max(depth - 1, 1)))
    )


def sampling(temperature: float, seed: int) -> SamplingConfig:
    """The paper's sampling: at temperature 0.6, top_p is 0.9 (section 5.2)."""
    return SamplingConfig(
        temperature=temperature, top_p=0.9 if temperature else 1.0, seed=seed
    )  # fmt: skip


def measured(lab: Lab, names: Sequence[str], temperatures: Sequence[float]) -> Rates:
    """Measures tokens per pass for every combination.

    The small form uses only built-in texts to continue. Both models know the built-in chats by
    heart, so these would show no difference.
    """
    from specexec_cli.lab.papers.lab import rate

    sets = [lab.dataset(name, chat=False, small=3) for name in (names if lab.full else ("demo",))]
    tokens = lab.tokens(_TOKENS, _SMALL_TOKENS)
    lab.session(sets, tokens)
    cases = [
        Case(method, tree(budget, method, full=lab.full), sampling(temperature, lab.seed), tokens)
        for temperature in temperatures
        for budget in (BUDGETS if lab.full else _SMALL_BUDGETS)
        for method in (PAPER, SPECINFER)
    ]
    found = {}
    for data in sets:
        for case, rows in lab.rows(cases, data).items():
            assert case.tree is not None
            key = data.name, case.sampling.temperature, case.method, case.tree.budget
            found[key] = rate(rows)
    return found


def _table(rates: Rates) -> Table:
    rows = []
    for name, t, budget in dict.fromkeys((name, t, budget) for name, t, _, budget in rates):
        found = [rates[name, t, method, budget] for method in (PAPER, SPECINFER)]
        more, error = found[0].above(found[1])
        rows.append(
            [name, f"{t:g}", str(budget), *map(str, found), f"{more:+.2f} ±{error:.2f}",
             ", ".join(f"{one.nodes:.0f}" for one in found),
             ", ".join(str(len(one.counts)) for one in found)]
        )  # fmt: skip
    header = ["prompts", "temp", "budget", PAPER, SPECINFER, "difference", "nodes of both",
              "numbers of prompts"]  # fmt: skip
    return Table("Committed tokens per target pass, with standard errors of micro", header, rows)


def _lines(rates: Rates, name: str, temperature: float) -> dict[str, Any]:
    lines: dict[str, Any] = {}
    for (data, t, method, budget), one in rates.items():
        if (data, t) == (name, temperature):
            x, y, errors = lines.setdefault(method, ([], [], []))
            x.append(budget)
            y.append(one.micro)
            errors.append(one.error)
    return lines


def _figures(rates: Rates) -> dict[str, Any]:
    from specexec_cli.lab.papers.draw import curves

    def drawn(name: str, temperature: float) -> Any:
        title = f"{name}, temperature {temperature:g}"
        return lambda: curves(
            title, "budget: most draft tokens per pass", "committed tokens per target pass, micro",
            _lines(rates, name, temperature), doubling=True,
        )  # fmt: skip

    panels = dict.fromkeys((name, t) for name, t, _, _ in rates)
    return {f"{name}-t{t:g}": drawn(name, t) for name, t in panels}


def grows(rates: Rates) -> list[Claim]:
    """Claims: SpecExec gains from more draft tokens, and is not behind at the largest budget.

    At temperature 0, where nothing is drawn at random, any lower rate than SpecInfer's is behind.
    Otherwise, only a difference of more than two standard errors is.
    """
    claims = []
    for name, t in dict.fromkeys((name, t) for name, t, _, _ in rates):
        sizes = sorted({key[3] for key in rates if key[:2] == (name, t)})
        first, last = (rates[name, t, PAPER, size] for size in (sizes[0], sizes[-1]))
        where = f"{name}, temperature {t:g}"
        claims.append(
            Claim(f"SpecExec accepts more with {sizes[-1]} draft tokens than with {sizes[0]} "
                  f"({where}: {last} against {first})", last.micro > first.micro)
        )  # fmt: skip
        other = rates.get((name, t, SPECINFER, sizes[-1]))
        if other is not None:
            noise = 2 * math.hypot(last.error, other.error) if t else 0.0
            claims.append(
                Claim(f"SpecExec is not behind SpecInfer at {sizes[-1]} ({where}: {last} against "
                      f"{other})", last.micro + noise >= other.micro)
            )  # fmt: skip
    return claims


def _compared(lab: Lab, names: Sequence[str], temperatures: Sequence[float]) -> Finding:
    rates = measured(lab, names, temperatures)
    return Finding(
        tables=[_table(rates)], claims=grows(rates), figures=_figures(rates),
        notes=[f"texts of at most {lab.tokens(_TOKENS, _SMALL_TOKENS)} tokens; a text's last pass "
               "counts as one, though its end may have cut it short", AVERAGES,
               "the difference is of micro over the prompts of both, its error of the pairs"],
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


# Pass times of Llama 2 70B in 16 bits, streamed over PCIe 4.0 x16 to an A100, and of the 7B draft
# model there: bytes over bytes per second, and 2 operations per weight and row at half of the GPU's
# 312 TFLOP/s.
_TARGET_BYTES, _LINK, _MEMORY, _DEVICE = 140e9, 25e9, 2e12, 80e9
_ROW_S, _DRAFT_S = 2 * 70e9 / 156e12, 0.02


@recipe(
    "specexec-figure-7",
    printed="figures 1 and 7 (right): an offloaded pass takes hundreds of tokens in the time of "
    "one; the fastest budget is 128-512 for SpecInfer and 1024-2048 for SpecExec",
)
def figure_7(lab: Lab) -> Finding:
    """Tokens per pass as measured here, divided by pass times from that machine's rates."""
    from specexec_cli.lab.papers.draw import curves
    from specexec_cli.lab.simulate.offload import Scenario

    machine = Scenario(
        target_bytes=_TARGET_BYTES, link_bytes_per_s=_LINK, memory_bytes_per_s=_MEMORY,
        device_bytes=_DEVICE, devices=1, draft_s=_DRAFT_S, acceptance=0.8, row_s=_ROW_S,
    )  # fmt: skip
    sizes = [2**power for power in range(14)]
    passes = [machine.streamed_pass_s(rows) for rows in sizes]
    rates = measured(lab, ["mt-bench"], (0.6,))
    lines: dict[str, Any] = {}
    rows = []
    for (_, _, method, budget), one in rates.items():
        shape = tree(budget, method, full=lab.full)
        seconds = machine.streamed_pass_s(budget + 1) + shape.max_depth * _DRAFT_S
        x, y, errors = lines.setdefault(method, ([], [], []))
        x.append(budget)
        y.append(one.micro / seconds)
        errors.append(one.error / seconds)
        rows.append([method, str(budget), str(one), f"{y[-1]:.3f}"])
    best = {method: max(zip(y, x, strict=True))[1] for method, (x, y, _) in lines.items()}
    return Finding(
        tables=[
            Table("Seconds of a pass, reckoned", ["rows", "s"],
                  [[str(n), f"{s:.2f}"] for n, s in zip(sizes, passes, strict=True)]),
            Table("Tokens per second that follow from the micro rates",
                  ["method", "budget", "tok/pass", "tok/s"], rows),
        ],
        claims=[
            Claim(f"SpecExec's fastest budget is no smaller than SpecInfer's ({best[PAPER]} and "
                  f"{best[SPECINFER]})", best[PAPER] >= best[SPECINFER]),
        ],
        notes=["pass times follow from rates of an A100 with PCIe 4.0 and are not measured: that "
               "hundreds of rows take the time of one is their premise and no finding", AVERAGES],
        figures={
            "passes": lambda: curves("A streamed pass of a 70B target", "rows", "seconds",
                                     {"max(link, arithmetic)": (sizes, passes, ())},
                                     doubling=True),
            "speed": lambda: curves("Tokens per second that follow", "budget", "tok/s", lines,
                                    doubling=True),
        },
    )  # fmt: skip
