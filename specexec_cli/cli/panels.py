"""Help that fits a screen: --help shows the common options, --help-all every one of them."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

# Panels that --help names in one line each. Commands of few options have none of them.
SAMPLING, TREE, TREE_LISTS, MANY, MEMORY, ADVANCED, DSI = _NAMED = (
    "Sampling", "Draft tree", "Draft tree (comma lists)", "Several texts", "Memory", "Advanced",
    "Several devices (--method dsi)",
)  # fmt: skip
_SHOW_ALL = "specexec.help_all"


class _Panels:
    """What both kinds of commands have in common; goes before typer's class."""

    params: list[Any]
    help: str | None
    epilog: str | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # typer would break lines where the source does, besides where the screen ends
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(part.split()) for part in paragraphs)
        if named_options(self.params):
            self.params.append(
                TyperOption(
                    param_decls=["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_all,
                    help="Show all options and exit.",
                )
            )

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help, or all of it where --help-all has asked for it."""
        shown: Any = copy.copy(self)
        named = {} if ctx.meta.get(_SHOW_ALL) else named_options(self.params)
        if named:
            left_out = [option for options in named.values() for option in options]
            shown.params = [param for param in self.params if param not in left_out]
            lines = [
                f"{panel}: {', '.join(option.opts[0] for option in options)}"
                for panel, options in named.items()
            ]
            shown.epilog = "\n".join(["More options, which --help-all explains:", *lines])
        super(_Panels, shown).format_help(ctx, formatter)  # type: ignore[misc]


class PanelCommand(_Panels, TyperCommand):
    """A command with such help."""


class PanelGroup(_Panels, TyperGroup):
    """A command that has commands, with such help."""


def named_options(params: list[Any]) -> dict[str, list[Any]]:
    """The options that --help only names, by panel."""
    named = defaultdict(list)
    for param in params:
        panel = getattr(param, "rich_help_panel", None)
        if panel in _NAMED and not param.hidden:
            named[panel].append(param)
    return {panel: named[panel] for panel in _NAMED if panel in named}


def _show_all(ctx: typer.Context, _: TyperOption, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_SHOW_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit
