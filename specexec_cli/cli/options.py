"""Options that only the command line has, each declared once; see option_groups.py for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from specexec_cli.cli.complete import among
from specexec_cli.config import ADVANCED, COMMON, MEMORY
from specexec_cli.errors import ConfigError, nearest

OUTPUT = "Output"
# What a chat template adds to a turn, at most, when memory is planned.
TEMPLATE_TOKENS = 128


def one_of(value: str, flag: str, allowed: tuple[str, ...]) -> str:
    """`value`, checked against the words a flag takes.

    Raises:
        ConfigError: with the nearest word.
    """
    if value not in allowed:
        hint = nearest(value, list(allowed))
        raise ConfigError(f"{flag} '{value}' is not one of {', '.join(allowed)}.{hint}")
    return value


def option(panel: str, help: str, *flags: str, words: tuple[str, ...] = (), **more: Any) -> Any:
    """An option in a panel of the help.

    Args:
        flags: unless told, two dashes and the parameter's name.
        words: all that it takes, which TAB offers; without them, anything.
        more: other arguments of typer.Option.
    """
    if words:
        more |= {"callback": _checked(words), "autocompletion": among(*words)}
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


def _checked(words: tuple[str, ...]) -> Callable[[typer.Context, typer.CallbackParam, str], str]:
    def check(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
        return value if ctx.resilient_parsing else one_of(value, param.opts[0], words)

    return check


System = Annotated[str | None, typer.Option(help="System prompt.")]
Think = Annotated[
    bool | None,
    option(
        ADVANCED, "Ask the chat template for thinking, or for none, if it can.",
        "--think/--no-think",
    ),
]  # fmt: skip
Yes = Annotated[
    bool, option(COMMON, "Fetch models that are not here without asking.", "--yes", "-y")
]
Context = Annotated[
    int | None,
    option(
        MEMORY,
        "Most tokens of the conversation. Default: the window, memory planned for 4096.",
        min=64,
    ),
]
Stats = Annotated[bool, option(OUTPUT, "A line of statistics at the end.", "--stats")]
Json = Annotated[bool, option(OUTPUT, "One JSON object on stdout, nothing else.", "--json")]
Quiet = Annotated[bool, option(OUTPUT, "Nothing on stderr but errors.", "--quiet", "-q")]
