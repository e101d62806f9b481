"""Draws the papers' figures from results, with matplotlib (the `plots` extra)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench.cases import BASELINE, variant
from specexec_cli.lab.bench.results import Row
from specexec_cli.lab.bench.summary import Summary

_SIZE = (6.4, 4.2)  # inches
_METHOD_STYLE = {
    "specexec": ("C0", "o"), "specinfer": ("C1", "s"), "beam": ("C2", "^"),
    "beam-pruned": ("C3", "v"), "chain": ("C4", "D"), "chain-coupled": ("C5", "P"),
    "specexec-paper": ("C6", "X"),
}  # fmt: skip


def draw_all(
    summaries: Sequence[Summary], coverages: Sequence[Row], folder: Path, form: str
) -> list[Path]:
    """Draws every figure for which the results have numbers.

    Args:
        form: png or svg.
    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    drawn: list[Path] = []
    figures: list[tuple[str, Any]] = []
    for number, group in enumerate(_panels(summaries), start=1):
        config, temperature = group[0]["config"], group[0]["case"]["temperature"]
        title = f"pair {config['pair']}, prompts {config['dataset']}, temperature {temperature:g}"
        name = f"{number}-{config['pair']}-{config['dataset']}-t{temperature:g}".replace("/", "_")
        figures.append((f"tokens-per-pass-{name}", _against_budget(group, title, *_RATE)))
        figures.append((f"tokens-per-s-{name}", _against_budget(group, title, *_SPEED)))
        figures.append((f"time-split-{name}", _time_split(group, title)))
    if coverages:
        figures.append(("coverage", _coverage(coverages)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures:
            if figure is not None:
                drawn.append(folder / f"{name}.{form}")
                figure.savefig(drawn[-1], dpi=130)
    except OSError as error:
        raise ConfigError(f"cannot write figures to {folder}: {error.strerror}") from error
    return drawn


def _panels(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """Groups summaries for figures: those of a group differ only in method and tree."""
    panels: dict[str, list[Summary]] = {}
    for summary in summaries:
        case, environment = summary["case"], summary["environment"]
        key = [summary["config"], case["temperature"], environment["commit"]]
        panels.setdefault(json.dumps([*key, environment["hardware"]]), []).append(summary)
    return list(panels.values())


def new_figure(title: str, height: float = _SIZE[1]) -> tuple[Any, Any]:
    """A new figure of the usual width, and its axes.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing needs matplotlib, which is not installed: pip install matplotlib, "
            "or leave `figures` out"
        ) from error
    figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


_RATE: tuple[str, str] = ("generation_rate", "committed tokens per target pass, macro")
_SPEED: tuple[str, str] = ("tokens_per_s", "tokens per second, prefill included")


def _against_budget(summaries: Sequence[Summary], title: str, metric: str, label: str) -> Any:
    """Draws a line for each method over its budget (or speculation length), shaded p20 to p80."""
    figure, axes = new_figure(title)
    budgets: set[int] = set()
    drafted = [s for s in summaries if s["case"]["method"] in _METHOD_STYLE]
    lines = list(dict.fromkeys(variant(s["case"]) for s in drafted))
    for method in lines:
        color, marker = _METHOD_STYLE[method.split()[0]]
        kin = [other for other in lines if other.split()[0] == method.split()[0]]
        style = ("-", "--", ":", "-.")[kin.index(method) % 4]
        points = sorted(
            ((s["case"]["budget"], s["metrics"][metric]) for s in drafted
             if variant(s["case"]) == method),
            key=lambda point: point[0],
        )  # fmt: skip
        x = [budget for budget, _ in points]
        budgets |= set(x)
        axes.plot(x, [m["mean"] for _, m in points], color=color, marker=marker, linestyle=style,
                  label=method)  # fmt: skip
        low, high = [m["p20"] for _, m in points], [m["p80"] for _, m in points]
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    if not budgets:
        return None
    baseline = [s["metrics"][metric]["mean"] for s in summaries if s["case"]["method"] == BASELINE]
    if baseline:
        axes.axhline(baseline[0], color="grey", linestyle="--", linewidth=1, label=BASELINE)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(budgets), [str(budget) for budget in sorted(budgets)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("budget: most draft tokens per pass")
    axes.set_ylabel(label)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _time_split(summaries: Sequence[Summary], title: str) -> Any:
    """Draws seconds per token: drafting, streaming at the link's best rate, rest of the passes."""
    figure, axes = new_figure(title, 1.2 + 0.25 * len(summaries))
    parts: dict[str, list[float]] = {"draft": [], "stream at the link's rate": [],
                                     "rest of the passes": [], "other": []}  # fmt: skip
    for summary in summaries:
        passes, metrics = summary["passes"], summary["metrics"]
        tokens = summary["generation_rate"]["micro"] * passes["target_passes"]
        link = summary["link"]["link_bytes_per_s"]
        streamed = metrics["bytes_per_pass"]["mean"] * passes["target_passes"]
        stream_s = min(streamed / link, passes["verify_s"]) if link else 0.0
        other_s = max(0.0, passes["total_s"] - passes["draft_s"] - passes["verify_s"])
        seconds = (passes["draft_s"], stream_s, passes["verify_s"] - stream_s, other_s)
        for part, value in zip(parts.values(), seconds, strict=True):
            part.append(value / tokens)
    rows = range(len(summaries))
    left = [0.0] * len(summaries)
    for color, (label, values) in zip(("C1", "C0", "C9", "lightgrey"), parts.items(), strict=True):
        if any(values):
            axes.barh(rows, values, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(rows, [summary["label"] for summary in summaries])
    axes.invert_yaxis()
    axes.set_xlabel("seconds per generated token")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _coverage(rows: Sequence[Row]) -> Any:
    """Draws SpecExec's figure 2: the target probability of the k likeliest draft tokens."""
    figure, axes = new_figure("Probability of the target covered by the k likeliest tokens")
    ranks: set[int] = set()
    for number, row in enumerate(rows):
        name = f"{row['config']['pair']}, {row['config']['dataset']}, "
        name += f"temperature {row['case']['temperature']:g}"
        color = f"C{number}"
        axes.plot(row["top_k"], row["draft_mass"], color=color, marker="o", label=f"draft: {name}")
        axes.plot(row["top_k"], row["target_mass"], color=color, linestyle="--",
                  label=f"target itself: {name}")  # fmt: skip
        ranks |= set(row["top_k"])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ranks), [str(rank) for rank in sorted(ranks)])
    axes.minorticks_off()
    axes.set_ylim(top=1.005)
    axes.set_xlabel("k")
    axes.set_ylabel("covered probability, mean over positions")
    axes.legend(frameon=False, fontsize=8)
    return figure
