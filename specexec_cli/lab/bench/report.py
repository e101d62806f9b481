"""Reports results: tables, coverage, the papers' rows beside ours, and figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specexec_cli.config import SamplingConfig
from specexec_cli.errors import ConfigError
from specexec_cli.guarded import parse_json
from specexec_cli.lab.bench.coverage import Coverage
from specexec_cli.lab.bench.datasets import Dataset
from specexec_cli.lab.bench.environment import environment
from specexec_cli.lab.bench.paper import PaperRow, rows_for
from specexec_cli.lab.bench.results import Row, read_results, row_config, row_key
from specexec_cli.lab.bench.schema import SCHEMA
from specexec_cli.lab.bench.summary import Summary, summarize
from specexec_cli.lab.bench.tables import aligned, markdown, render

if TYPE_CHECKING:
    from specexec_cli.session import TextSession


def make_report(
    paths: Sequence[Path],
    form: str,
    figures: Path | None,
    figure_format: str,
    width: int | None = None,
) -> tuple[str, list[Path]]:
    """Writes a report; returns its text and the paths of the figures.

    Args:
        figures: folder for figures, or None for no figures.
        width: columns of the terminal for tables, or None for any width.
    Raises:
        ConfigError: a file cannot be read, there is no result, or matplotlib is not installed.
    """
    rows = [row for path in paths for row in read_results(path)]
    if not rows:
        raise ConfigError(f"no result in {', '.join(map(str, paths))}")
    summaries = summarize(rows)
    coverages = [row for row in rows if row["kind"] == "coverage"]
    drawn: list[Path] = []
    if figures is not None:
        from specexec_cli.lab.bench.plots import draw_all

        drawn = draw_all(summaries, coverages, figures, figure_format)
    notes = sorted({_origin(row) for row in rows})
    if form in ("json", "csv"):
        return _machine_readable(summaries, coverages, form, notes), drawn
    parts = [render(summaries, form, notes, width)] if summaries else []
    parts += [coverage_table(coverages, form, width)] if coverages else []
    parts += _beside_papers(summaries, form, width)
    return "\n\n".join(parts), drawn


def _machine_readable(
    summaries: Sequence[Summary], coverages: Sequence[Row], form: str, notes: Sequence[str]
) -> str:
    if form == "csv":
        if not summaries:
            raise ConfigError("these results hold no run; coverage is printed with -o json or md")
        return render(summaries, form, notes)
    return json.dumps({**parse_json(render(summaries, form, notes)), "coverage": list(coverages)})


def _origin(row: Row) -> str:
    """The origin of a result, for the notes."""
    config, environment = row["config"], row["environment"]
    hardware = environment["hardware"]
    devices = ", ".join(hardware["gpus"]) or f"{hardware['cpu']}, {hardware['cores']} cores"
    return (
        f"{config['pair']}: {config['dtype']} on {config['device']} ({devices}), offload "
        f"{config['offload']}, commit {(environment['commit'] or 'unknown')[:12]}"
    )


def coverage_row(
    session: TextSession,
    dataset: Dataset,
    sampling: SamplingConfig,
    max_tokens: int,
    found: Coverage,
) -> Row:
    """The row of the results file for a coverage measurement."""
    config = row_config(session, dataset)
    case = {
        "temperature": sampling.temperature, "max_tokens": max_tokens, "seed": sampling.seed,
    }  # fmt: skip
    env = environment()
    ranks = list(found.top_k)
    return {
        "schema": SCHEMA,
        "kind": "coverage",
        "key": row_key({"config": config, "case": case, "top_k": ranks, "environment": env}),
        "config": config,
        "case": case,
        "top_k": ranks,
        "draft_mass": list(found.draft_mass),
        "target_mass": list(found.target_mass),
        "positions": found.positions,
        "environment": env,
    }


def coverage_table(rows: Sequence[Row], form: str, width: int | None = None) -> str:
    """A table of target probability by k: of the draft's first tokens and of the target's own."""
    header = ["pair", "temp", "k", "draft's top k", "target's top k"]
    cells = [
        [row["config"]["pair"], f"{row['case']['temperature']:g}", str(k), f"{d:.1%}", f"{t:.1%}"]
        for row in rows
        for k, d, t in zip(row["top_k"], row["draft_mass"], row["target_mass"], strict=True)
    ]
    if form == "csv":
        return "\n".join(",".join(line) for line in [header, *cells])
    title = "Probability of the target covered"
    lines = markdown(header, cells) if form == "md" else aligned(header, cells, width)
    return "\n".join([title, "", *lines])


def _beside_papers(summaries: Sequence[Summary], form: str, width: int | None) -> list[str]:
    """The papers' rows of our pairs and ours, one table per pair and device."""
    parts = []
    # the program of SpecExec's authors prints macro averages
    header = ["from", "method", "data", "temp", "budget", "tok/pass macro", "tok/pass micro",
              "tok/s macro", "tok/s micro", "speedup"]  # fmt: skip
    pairs: dict[tuple[str, str | None, str], list[Summary]] = {}
    for summary in summaries:
        models = summary["config"]
        pairs.setdefault((models["target"], models["draft"], _device(summary)), []).append(summary)
    for (target, draft, device), measured in pairs.items():
        published = [_paper_cells(row) for row in rows_for(target, draft, device)]
        if published:
            cells = [*published, *map(_our_cells, measured)]
            lines = markdown(header, cells) if form == "md" else aligned(header, cells, width)
            parts.append("\n".join([f"{target} with {draft}: published and measured", "", *lines]))
    return parts


def _device(summary: Summary) -> str:
    hardware = summary["environment"]["hardware"]
    return str((hardware["gpus"] or [hardware["cpu"]])[0])


def _paper_cells(row: PaperRow) -> list[str]:
    return [
        f"{row.source}, {row.hardware}", row.method, row.dataset, f"{row.temperature:g}",
        str(row.budget), f"{row.generation_rate:.2f}", "-", f"{row.tokens_per_s:.2f}", "-",
        f"{row.speedup:g}x",
    ]  # fmt: skip


def _our_cells(summary: Summary) -> list[str]:
    metrics, speedup, rate = summary["metrics"], summary["speedup"], summary["generation_rate"]
    return [
        f"here, {_device(summary)}", summary["case"]["method"],
        summary["config"]["dataset"], f"{summary['case']['temperature']:g}",
        str(summary["case"].get("budget", "-")), f"{rate['macro']:.2f}", f"{rate['micro']:.2f}",
        f"{metrics['tokens_per_s']['mean']:.2f}", f"{summary['tokens_per_s']:.2f}",
        f"{speedup['overall']:.1f}x" if speedup else "-",
    ]  # fmt: skip
