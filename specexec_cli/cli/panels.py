"""Help that fits a screen: --help shows the common options, --help-all every one of them."""

from __future__ import annotations

import copy
import inspect
import textwrap
from collections import defaultdict
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from specexec_cli.config import ADVANCED, DSI, MEMORY, SAMPLING, TREE

TREE_LISTS, MANY, DEVICES = "Draft tree (comma lists)", "Several texts", f"{DSI} (--method dsi)"
# Panels that --help mentions in one line each; only commands with many options use them.
_NAMED = (SAMPLING, TREE, TREE_LISTS, MANY, MEMORY, ADVANCED, DEVICES)
_SHOW_ALL = "specexec.help_all"
SETTINGS: set[str] = set()  # that the commands made so far have options for: "max_tokens"


class _Panels:
    """The help of both kinds of commands; a mixin that precedes typer's class."""

    params: list[Any]
    help: str | None
    epilog: str | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # joins the source's lines: typer would break at them as well as at the screen's edge
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(part.split()) for part in paragraphs)
        flags = [flag for param in self.params for flag in param.opts if flag.startswith("--")]
        SETTINGS.update(flag[2:].replace("-", "_") for flag in flags)
        if named_options(self.params):
            self.params.append(_help_all_option())

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help with the common options; after --help-all, with all options."""
        for param in super().get_params(ctx):  # type: ignore[misc]
            if getattr(param, "is_flag", False):
                param.metavar = ""  # typer from 0.29 on shows <bool>, but a flag takes no value
        shown: Any = copy.copy(self)
        named = {} if ctx.meta.get(_SHOW_ALL) else named_options(self.params)
        left_out = [option for options in named.values() for option in options]
        shown.params = [param for param in self.params if param not in left_out]
        super(_Panels, shown).format_help(ctx, formatter)  # type: ignore[misc]
        if named:
            formatter.write(_more_options(named, formatter.width))


class PanelCommand(_Panels, TyperCommand):
    """A command with help in panels."""


class PanelGroup(_Panels, TyperGroup):
    """A group of commands with help in panels."""


def named_options(params: list[Any]) -> dict[str, list[Any]]:
    """The options that --help only mentions by name, by panel."""
    named = defaultdict(list)
    for param in params:
        panel = getattr(param, "rich_help_panel", None)
        if panel in _NAMED and not param.hidden:
            named[panel].append(param)
    return {panel: named[panel] for panel in _NAMED if panel in named}


def _more_options(named: dict[str, list[Any]], width: int) -> str:
    """The lines below the help that name the options left out, one line for each panel.

    typer's epilog is not used, because some versions of typer join its lines.
    """
    lines = ["", "More options, which --help-all explains:"]
    for panel, options in named.items():
        lines.append(f"{panel}: {', '.join(option.opts[0] for option in options)}")
    wrapped = [
        textwrap.fill(
            line, width, initial_indent=" ", subsequent_indent=" ", break_on_hyphens=False
        )
        for line in lines
    ]
    return "\n".join(wrapped)


def _help_all_option() -> Any:
    """The option --help-all, made by typer itself: its class differs between versions of typer."""

    def command(
        help_all: Annotated[
            bool,
            typer.Option(
                "--help-all", help="Show all options and exit.",
                is_eager=True, expose_value=False, callback=_show_all,
            ),
        ] = False,
    ) -> None: ...  # fmt: skip

    app = typer.Typer(add_completion=False)
    app.command()(command)
    return get_command(app).params[0]


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_SHOW_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit
