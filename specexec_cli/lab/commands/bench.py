"""`specexec bench`: measures methods against plain decoding, and reports the results."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specexec_cli.cli import option_groups, options
from specexec_cli.cli.opening import opened
from specexec_cli.cli.options import option
from specexec_cli.cli.panels import PanelCommand, PanelGroup
from specexec_cli.config import ADVANCED, BenchMethod, DsiOptions, SamplingConfig, TreeConfig
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, ConfigError
from specexec_cli.lab.commands.bench_grid import GridOptions, numbers, words
from specexec_cli.lab.commands.bench_models import (
    PROMPTS,
    Data,
    measured_request,
    open_distributed,
    open_models,
)
from specexec_cli.lab.commands.bench_paper import paper

if TYPE_CHECKING:
    from specexec_cli.lab.bench.datasets import Dataset
    from specexec_cli.lab.bench.runner import Bench, BenchPrompt, Run
    from specexec_cli.session import TextSession


class _ModelOrCommand(PanelGroup):
    """A group whose first word is a model where it is no command: `bench MODEL --prompts 5`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = self.make_parser(ctx).parse_args(list(args))[1]
        if rest and rest[0] not in self.commands:
            at = len(args) - len(rest)
            args = [*args[:at], "--model", *rest]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ModelOrCommand,
    subcommand_metavar="[MODEL | COMMAND [ARGS]...]",
    help="Measure decoding methods against plain decoding on the same prompts.\n\n"
    "Texts are greedy unless asked, whatever the model's makers suggest.",
    invoke_without_command=True,
)

app.command(cls=PanelCommand)(paper)

DatasetNames = Annotated[
    str,
    option(
        PROMPTS,
        "demo, oasst, wikitext2, c4, mt-bench, humaneval, mbpp, cnn-dailymail, alpaca, a FILE, or "
        "NAME=FILE.",
    ),
]
Prompts = Annotated[int, option(PROMPTS, "Prompts per dataset.")]
Repeats = Annotated[int, option(ADVANCED, "Runs of each combination and prompt.")]
Warmup = Annotated[int, option(ADVANCED, "Short unmeasured runs of each combination.")]
Results = Annotated[Path, typer.Option(help="Runs are appended here; none is repeated.")]
Output = Annotated[str, typer.Option("--output", "-o", help="table, md, json or csv.")]


@app.callback()
@option_groups.grouped
def bench(
    *,
    ctx: typer.Context,
    asked: option_groups.MeasuredByOption,
    yes: options.Yes = False,
    cases: GridOptions,
    workers: DsiOptions,
    dataset: DatasetNames = "demo",
    data: Data = Path("data"),
    prompts: Prompts = 10,
    max_tokens: option_groups.MaxTokens = 128,
    baseline_tokens: Annotated[
        int | None,
        option(ADVANCED, "Fewer tokens for the baseline, which is slow. Default: as many."),
    ] = None,
    repeats: Repeats = 1,
    warmup: Warmup = 1,
    sampling: Annotated[SamplingConfig, option_groups.Shown("top_p top_k seed")],
    results: Results = Path("bench.jsonl"),
    output: Output = "table",
    quiet: options.Quiet = False,
) -> None:
    """Measure decoding methods on the same prompts, beside the autoregressive baseline.

    Runs take turns; each is one line of the results file. Stopped by Ctrl-C, the same command
    goes on where it was.
    """
    if ctx.invoked_subcommand is not None:
        return
    from specexec_cli.cli.fetching import fetch_first
    from specexec_cli.lab.bench.cases import DISTRIBUTED
    from specexec_cli.lab.bench.datasets import load_dataset
    from specexec_cli.lab.bench.results import ResultsFile
    from specexec_cli.lab.bench.tables import FORMATS

    options.one_of(output, "--output", FORMATS)
    _at_least({"--repeats": (repeats, 1), "--warmup": (warmup, 0), "--prompts": (prompts, 1)})
    grid = cases.grid(sampling, max_tokens=max_tokens, baseline_tokens=baseline_tokens)
    sets = [load_dataset(name, data_folder=data, count=prompts)
            for name in words(dataset, "--dataset")]  # fmt: skip
    file = ResultsFile(results)
    apart = not set(DISTRIBUTED).isdisjoint(grid.methods)
    request = measured_request(asked, sets, max_tokens, several_drafts=apart)
    fetch_first(request, yes=yes, quiet=quiet)
    with ExitStack() as stack:
        session = stack.enter_context(opened(request, quiet=quiet))
        distributed, how = None, None
        if apart:
            wanted = replace(workers, more_drafts=request.dsi.more_drafts)
            distributed, how = open_distributed(request, wanted, yes, quiet)
            stack.enter_context(distributed)
        usual: BenchMethod = "suffix" if session.pair.suffix else "specexec"
        found = grid.cases(_tree(session, cases.batch), how, usual)
        _measure(session, distributed, found, sets, max_tokens, repeats, warmup, file, output,
                 quiet)  # fmt: skip


def _at_least(given: dict[str, tuple[int, int]]) -> None:
    """Refuses numbers below the minimum of their options."""
    for flag, (value, least) in given.items():
        if value < least:
            raise ConfigError(f"{flag} must be {least} or more, not {value}")


def _tree(session: TextSession, batch: int | None) -> TreeConfig:
    """The tree recommended for the pair, with the user's batch if one was given."""
    recommended = session.pair.tree
    return TreeConfig(
        budget=recommended.budget, max_depth=recommended.max_depth,
        batch=recommended.batch if batch is None else batch,
    )  # fmt: skip


def _measure(
    session: TextSession,
    distributed: TextSession | None,
    cases: list[Any],
    sets: list[Dataset],
    max_tokens: int,
    repeats: int,
    warmup: int,
    file: Any,
    output: str,
    quiet: bool,
) -> None:
    """Runs all missing runs and prints a table of all results; after Ctrl-C, of those so far.

    Args:
        distributed: the session that runs cases of the method dsi.
    """
    from specexec_cli.cli.render import notice
    from specexec_cli.lab.bench.environment import environment, link
    from specexec_cli.lab.bench.runner import Bench, encode_prompts, interleaved
    from specexec_cli.lab.bench.summary import summarize
    from specexec_cli.lab.bench.tables import render, width

    encoded, notes = [], []
    for one in sets:
        usable, skipped = encode_prompts(session, one, max_tokens)
        encoded.append((one, usable))
        notes.append(f"{one.name}: {len(usable)} prompts from {one.source}")
        if skipped:
            notes[-1] += f"; {len(skipped)} too long for the context window, skipped"
    measured_link = link(session)
    notes.append(f"weights: {measured_link['io']}")
    bench = Bench(session, file, environment(), measured_link, distributed)
    runs = list(interleaved(cases, encoded, repeats))
    keys = [bench.key(run) for run in runs]
    finished = sum(key in file.rows for key in keys)
    if finished and not quiet:
        notice(f"{finished} of {len(runs)} runs are in {file.path} already and are not repeated")
    interrupted = False
    try:
        _run(bench, runs, finished, cases, encoded[0][1][0], warmup, quiet)
    except KeyboardInterrupt:
        interrupted = True
    rows = [file.rows[key] for key in keys if key in file.rows]
    if rows:
        notes.append(f"{len(rows)} of {len(runs)} runs, rows in {file.path}")
        print(render(summarize(rows), output, notes, width()))
    if interrupted:
        if not quiet:
            notice(f"stopped after {len(rows)} of {len(runs)} runs; the same command goes on")
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _run(
    bench: Bench,
    runs: list[Run],
    finished: int,
    cases: list[Any],
    prompt: BenchPrompt,
    warmup: int,
    quiet: bool,
) -> None:
    from specexec_cli.cli.render import CountBar

    with CountBar("measuring", len(runs), done=finished, shown=not quiet) as bar:
        if finished < len(runs):
            bench.warm_up(cases, prompt, warmup)
        bench.measure(runs, lambda row: bar.advance(row["label"]))


@app.command(cls=PanelCommand)
@option_groups.grouped
def coverage(
    *,
    asked: option_groups.Measured,
    yes: options.Yes = False,
    dataset: DatasetNames = "demo",
    data: Data = Path("data"),
    prompts: Prompts = 10,
    max_tokens: option_groups.MaxTokens = 64,
    top_k: Annotated[str, typer.Option(help="Values of k, a comma list.")] = "1,2,4,8,16,32,64",
    sampling: Annotated[SamplingConfig, option_groups.Shown("temperature seed", temperature=1.0)],
    results: Results = Path("bench.jsonl"),
    output: Output = "table",
    quiet: options.Quiet = False,
) -> None:
    """Target probability that the draft's k likeliest tokens cover.

    Measured at the positions of texts that the target samples from the prompts.
    """
    from specexec_cli.lab.bench.coverage import check_settings, measure_coverage
    from specexec_cli.lab.bench.datasets import load_dataset
    from specexec_cli.lab.bench.report import coverage_row, coverage_table
    from specexec_cli.lab.bench.results import ResultsFile
    from specexec_cli.lab.bench.tables import FORMATS, width

    options.one_of(output, "--output", FORMATS)
    ranks = numbers(top_k, "--top-k", int)
    check_settings(sampling, ranks)
    one = load_dataset(dataset, data_folder=data, count=prompts)
    file = ResultsFile(results)
    with open_models(asked, [one], max_tokens, yes, quiet) as session:
        from specexec_cli.lab.bench.runner import encode_prompts

        usable, skipped = encode_prompts(session, one, max_tokens)
        found = measure_coverage(session, usable, sampling, max_tokens, ranks)
        row = coverage_row(session, one, sampling, max_tokens, found)
    file.append(row)
    if output == "json":
        print(json.dumps(row))
        return
    print(coverage_table([row], output, width()))
    if output != "csv":
        print(f"\n- {found.positions} positions of {len(usable)} texts by the target, "
              f"{len(skipped)} prompts too long; row in {file.path}")  # fmt: skip


@app.command(cls=PanelCommand)
def report(
    results: Annotated[list[Path], typer.Argument(help="Results files.")],
    output: Output = "table",
    figures: Annotated[
        Path | None, typer.Option(help="Folder to draw the papers' figures into.")
    ] = None,
    figure_format: Annotated[str, typer.Option("--format", help="png or svg.")] = "png",
) -> None:
    """Compare results, draw figures, and show the papers' rows."""
    from specexec_cli.lab.bench.report import make_report
    from specexec_cli.lab.bench.tables import FORMATS, width

    options.one_of(output, "--output", FORMATS)
    options.one_of(figure_format, "--format", ("png", "svg"))
    text, drawn = make_report(results, output, figures, figure_format, width())
    print(text)
    for path in drawn:
        print(f"figure: {path}", file=sys.stderr)
