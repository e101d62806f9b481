"""Writes summaries as a table for the terminal, as Markdown, CSV or JSON; returns text."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specexec_cli.lab.bench.metrics import TIMING
from specexec_cli.lab.bench.summary import Summary

FORMATS = ("table", "md", "json", "csv")

Column = tuple[str, Callable[[Summary], str]]


def _mean(name: str, scale: float = 1.0, digits: int = 2) -> Callable[[Summary], str]:
    def cell(summary: Summary) -> str:
        found = summary["metrics"][name]
        return "-" if found is None else f"{found['mean'] * scale:.{digits}f}"

    return cell


def _percent(name: str) -> Callable[[Summary], str]:
    def cell(summary: Summary) -> str:
        found = summary["metrics"][name]
        return "-" if found is None else f"{found['mean']:.0%}"

    return cell


def _tokens_per_s(summary: Summary) -> str:
    """Tokens per second of all runs together, and the standard deviation between runs."""
    return f"{summary['tokens_per_s']:.2f} ±{summary['metrics']['tokens_per_s']['sd']:.2f}"


def _rate(average: str) -> Callable[[Summary], str]:
    return lambda summary: f"{summary['generation_rate'][average]:.2f}"


def _quantiles(summary: Summary) -> str:
    found = summary["metrics"]["tokens_per_s"]
    return f"{found['p20']:.2f}/{found['p50']:.2f}/{found['p80']:.2f}"


def _speedup(summary: Summary) -> str:
    found = summary["speedup"]
    if found is None:
        return "-"
    predicted = summary["predicted_speedup"]
    return f"{found['overall']:.2f}x" + (f" ({predicted:.2f}x)" if predicted else "")


def _same(summary: Summary) -> str:
    found = summary["same_text"]
    return "-" if found is None else f"{found['same']}/{found['of']}"


def _split(summary: Summary) -> str:
    passes = summary["passes"]
    return (
        f"{passes['draft_s'] / passes['total_s']:.0%}/{passes['verify_s'] / passes['total_s']:.0%}"
    )


def _tree(summary: Summary) -> str:
    metrics = summary["metrics"]
    return f"{metrics['tree_nodes']['mean']:.0f}/{metrics['tree_depth']['mean']:.1f}"


def _ece(summary: Summary) -> str:
    errors = summary["calibration_errors"]
    return "-" if errors is None else f"{errors[0]:.3f}/{errors[1]:.3f}"


COLUMNS: tuple[Column, ...] = (
    ("method", lambda s: s["label"]),
    ("data", lambda s: s["config"]["dataset"]),
    ("temp", lambda s: f"{s['case']['temperature']:g}"),
    ("tok/s micro", _tokens_per_s),
    ("tok/s macro", _mean("tokens_per_s")),
    ("p20/50/80", _quantiles),
    ("speedup", _speedup),
    ("tok/pass micro", _rate("micro")),
    ("tok/pass macro", _rate("macro")),
    ("accept", _percent("acceptance_rate")),
    ("tree/depth", _tree),
    ("TTFT s", _mean("ttft_s")),
    ("TPOT s", _mean("tpot_s", digits=3)),
    ("draft/verify", _split),
    ("MB/pass", _mean("bytes_per_pass", 1e-6, 1)),
    ("MB/tok", _mean("bytes_per_token", 1e-6, 1)),
    ("GB/s", _mean("stream_bytes_per_s", 1e-9)),
    ("experts/tok", _mean("experts_per_token", digits=0)),
    ("in RAM", _percent("experts_held_share")),
    ("link", _percent("link_share")),
    ("roofline", _percent("roofline_share")),
    ("ECE draft/used", _ece),
    ("RAM GB", _mean("peak_ram_bytes", 1e-9)),
    ("VRAM GB", _mean("peak_vram_bytes", 1e-9)),
    ("same text", _same),
    ("runs", lambda s: str(s["runs"])),
)


def render(
    summaries: Sequence[Summary], form: str, notes: Sequence[str], width: int | None = None
) -> str:
    """Writes the summaries in one of FORMATS; notes go below a table and into the JSON.

    Args:
        width: columns of the terminal for a table; None allows lines of any length.
    """
    if form == "json":
        return json.dumps(
            {"schema": 1, "cases": list(summaries), "notes": list(notes), "timing": dict(TIMING)}
        )
    if form == "csv":
        return _csv(summaries)
    header = [name for name, _ in COLUMNS]
    rows = [[cell(summary) for _, cell in COLUMNS] for summary in summaries]
    kept = [0, *(i for i in range(1, len(header)) if any(row[i] not in _EMPTY for row in rows))]
    header = [header[i] for i in kept]
    rows = [[row[i] for i in kept] for row in rows]
    below = [f"- {note}" for note in [*notes, *_legend()]]
    if form == "md":
        return "\n".join([*markdown(header, rows), "", *below])
    if width is not None:
        below = [textwrap.fill(note, width, subsequent_indent="  ") for note in below]
    return "\n".join([*aligned(header, rows, width), "", *below])


_EMPTY = ("-", "0.00", "0.0")  # a column with only these cells is left out


def _legend() -> list[str]:
    return [
        f"tok/s: {TIMING['tokens_per_s']}. TTFT: {TIMING['ttft_s']}. TPOT: {TIMING['tpot_s']}.",
        f"Not in any time: {TIMING['excluded']}.",
        "tok/s: micro is all tokens over all seconds, macro the mean of the runs; the deviation "
        "and quantiles are of single runs. speedup: micro over the baseline's at the same prompts, "
        "temperature and seeds; in brackets what Leviathan et al. predict from the acceptance "
        "rate.",
        f"tok/pass: {TIMING['generation_rate']}.",
        "same text: runs whose tokens equal the baseline's; a method that keeps the distribution "
        "only has no such number. RAM: peak of the process.",
        f"ECE: {TIMING['ece']}.",
    ]


def aligned(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None
) -> list[str]:
    """A table with padded columns, the first aligned to the left and the others to the right.

    If it is wider than `width`, the columns are divided among several tables, each of which has the
    first column.
    """
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    blocks: list[list[int]] = [[]]
    used = widths[0]
    for i in range(1, len(header)):
        if width is not None and blocks[-1] and used + 2 + widths[i] > width:
            blocks.append([])
            used = widths[0]
        blocks[-1].append(i)
        used += 2 + widths[i]
    lines: list[str] = []
    for block in blocks:
        lines += [""] if lines else []
        lines += [
            "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in block)]).rstrip()
            for row in table
        ]
    return lines


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    rule = ["---", *("---:" for _ in header[1:])]
    return [f"| {' | '.join(row)} |" for row in [header, rule, *rows]]


def _csv(summaries: Sequence[Summary]) -> str:
    """CSV with a line per case: mean, standard deviation and quantiles of metrics, in SI units."""
    lines = [_flat(summary) for summary in summaries]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue().rstrip("\n")


def _flat(summary: Summary) -> dict[str, Any]:
    case, speedup = summary["case"], summary["speedup"]
    line: dict[str, Any] = {
        "label": summary["label"], "method": case["method"], "budget": case.get("budget"),
        "depth": case.get("max_depth"), "temperature": case["temperature"],
        "max_tokens": case["max_tokens"], "runs": summary["runs"], **summary["config"],
        "io": summary["link"]["io"], "commit": summary["environment"]["commit"],
        "speedup": speedup and speedup["overall"],
        "predicted_speedup": summary["predicted_speedup"],
        "ece_draft": (summary["calibration_errors"] or (None, None))[0],
        "ece": (summary["calibration_errors"] or (None, None))[1],
        **{f"generation_rate_{name}": rate for name, rate in summary["generation_rate"].items()},
    }  # fmt: skip
    for name, found in summary["metrics"].items():
        statistics: Mapping[str, Any] = found or {}
        line |= {f"{name}_{s}": statistics.get(s) for s in ("mean", "sd", "p20", "p50", "p80")}
    return line


def width() -> int | None:
    """Columns of the terminal; None if the output is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
