"""`specexec bench paper`: reproduces one table, figure, algorithm or theorem of a paper."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specexec_cli.cli import option_groups, options
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, ClaimLostError, ConfigError, nearest
from specexec_cli.lab.papers import RECIPES, Finding, Recipe, Setting
from specexec_cli.planning.request import Request

if TYPE_CHECKING:
    from specexec_cli.lab.bench.datasets import Dataset
    from specexec_cli.lab.papers.lab import Lab, OpenSession

_ALL = "all"


@option_groups.grouped
def paper(
    name: Annotated[str, typer.Argument(help="A recipe, or all. Without it they are listed.")] = "",
    *,
    asked: option_groups.MeasuredByOption,
    yes: options.Yes = False,
    full: Annotated[
        bool,
        typer.Option("--full", help="The paper's sizes, and real prompts: hours, not seconds."),
    ] = False,
    data: Annotated[Path, typer.Option(help="Folder of the datasets' files.")] = Path("data"),
    prompts: Annotated[
        int | None,
        typer.Option(help="Most prompts per dataset, in both forms. Default: as many as it takes."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of a text in the full form. Default: the recipe's own."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results, reports and figures.")] = Path(
        "papers"
    ),
    figure_format: Annotated[str, typer.Option("--format", help="png or svg.")] = "png",
    seed: option_groups.Seed = 0,
    output: Annotated[str, typer.Option("--output", "-o", help="table, md or json.")] = "table",
    quiet: options.Quiet = False,
) -> None:
    """Reproduce a table or figure of a paper.

    It says whether the paper's claim holds here; where not, the exit code is 11. The small form
    takes seconds on the demo pair. Stopped by Ctrl-C, the same command goes on.
    """
    from specexec_cli.lab.papers import report

    options.one_of(output, "--output", ("table", "md", "json"))
    options.one_of(figure_format, "--format", ("png", "svg"))
    _check(prompts, max_tokens, full)
    if not name:
        _list(output)
        return
    chosen = list(RECIPES.values()) if name == _ALL else [_recipe(name)]
    lost: list[str] = []
    from specexec_cli.cli.render import CountBar
    from specexec_cli.lab.papers.lab import Lab

    with ExitStack() as opened, CountBar("generations", None, shown=not quiet) as bar:
        lab = Lab(
            _opener(asked, yes, opened, quiet), out, full=full, data=data, most_prompts=prompts,
            most_tokens=max_tokens, seed=seed, done=bar.advance,
        )  # fmt: skip
        for one in chosen:
            finding = _run(one, lab, quiet)
            setting = lab.setting(one)
            written = report.write(one, finding, setting, out, figure_format)
            print(_shown(one, finding, setting, output, written))
            if not quiet:
                for path in written:
                    print(f"written: {path}", file=sys.stderr)
            lost += [f"{one.name}: {claim.text}" for claim in finding.claims if not claim.held]
    if lost:
        raise ClaimLostError(f"not so here: {'; '.join(lost)}")


def _check(prompts: int | None, max_tokens: int | None, full: bool) -> None:
    if prompts is not None and prompts < 2:
        raise ConfigError(f"--prompts must be 2 or more, not {prompts}")
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"--max-tokens must be 1 or more, not {max_tokens}")
    if max_tokens is not None and not full:
        raise ConfigError("--max-tokens is for the full form: add --full, or leave it out")


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(
            f"no recipe '{name}': `specexec bench paper` lists them.{nearest(name, [*RECIPES])}"
        )
    return RECIPES[name]


def _list(output: str) -> None:
    if output == "json":
        print(json.dumps({name: one.printed for name, one in RECIPES.items()}))
        return
    from specexec_cli.lab.bench.tables import width

    columns, indent = width(), max(map(len, RECIPES)) + 2
    for name, one in RECIPES.items():
        line = f"{name.ljust(indent)}{one.printed}"
        if columns is not None:
            line = textwrap.fill(
                line, columns, subsequent_indent=" " * indent, break_on_hyphens=False
            )
        print(line)


def _run(one: Recipe, lab: Lab, quiet: bool) -> Finding:
    try:
        return one.run(lab)
    except KeyboardInterrupt:
        if not quiet:
            print("stopped; the same command goes on", file=sys.stderr)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


def _shown(
    one: Recipe, finding: Finding, setting: Setting, output: str, written: Sequence[Path]
) -> str:
    from specexec_cli.lab.bench.tables import width
    from specexec_cli.lab.papers.report import text_of

    if output != "json":
        return text_of(one, finding, setting, output, width()) + "\n"
    return json.dumps({
        "schema": 1, "recipe": one.name, "printed": one.printed, "form": setting.form,
        "seed": setting.seed, "target": setting.target, "draft": setting.draft,
        "tables": [{"title": t.title, "header": list(t.header), "rows": [list(r) for r in t.rows]}
                   for t in finding.tables],
        "claims": [{"text": claim.text, "held": claim.held} for claim in finding.claims],
        "notes": list(finding.notes), "written": [str(path) for path in written],
    })  # fmt: skip


def _opener(asked: Request, yes: bool, opened: ExitStack, quiet: bool) -> OpenSession:
    """A function that opens the pair's session, or one with another draft model."""
    from specexec_cli.lab.commands.bench_models import open_models
    from specexec_cli.session import TextSession

    def open_one(sets: Sequence[Dataset], tokens: int, draft: str | None) -> TextSession:
        opened.close()  # closes the last session first: two big ones would not fit into memory
        named = asked if draft is None else replace(asked, draft=draft)
        return opened.enter_context(open_models(named, sets, tokens, yes, quiet))

    return open_one
