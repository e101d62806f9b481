"""Opens the sessions of commands that measure, with memory planned for their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specexec_cli.cli import option_groups, options
from specexec_cli.cli.opening import opened
from specexec_cli.config import DsiOptions
from specexec_cli.errors import ConfigError
from specexec_cli.planning.request import Request, TreeRequest

if TYPE_CHECKING:
    from specexec_cli.lab.bench.cases import Workers
    from specexec_cli.lab.bench.datasets import Dataset
    from specexec_cli.session import TextSession

PROMPTS = "Prompts"  # a panel of the help
Data = Annotated[Path, options.option(PROMPTS, "Folder of the datasets' files.")]


def measured_request(
    asked: Request,
    sets: Sequence[Dataset],
    max_tokens: int,
    several_drafts: bool = False,
) -> Request:
    """The request with memory planned for the longest of these prompts.

    Args:
        several_drafts: --draft may name further models, for the method dsi.
    """
    prompts = [prompt for one in sets for prompt in one.prompts]
    turns = max((len(prompt.messages) for prompt in prompts), default=1)
    text = max((prompt.text for prompt in prompts), key=len, default="")
    # a chat template adds some tokens to each turn
    beside = (1 + turns) * options.TEMPLATE_TOKENS + max_tokens
    return replace(
        option_groups.with_drafts(asked, several_drafts), tree=TreeRequest(policy="fixed"),
        prompt=text, context_tokens=beside,
    )  # fmt: skip


def open_models(
    asked: Request, sets: Sequence[Dataset], max_tokens: int, yes: bool, quiet: bool
) -> TextSession:
    """Opens a session with memory planned for the longest prompt; shows a bar while it loads."""
    from specexec_cli.cli.fetching import fetch_first

    request = measured_request(asked, sets, max_tokens)
    fetch_first(request, yes=yes, quiet=quiet)
    return opened(request, quiet=quiet)


def open_distributed(
    request: Request, wanted: DsiOptions, yes: bool, quiet: bool
) -> tuple[TextSession, Workers]:
    """Opens a session of the method dsi besides the other one; returns it with its settings.

    Raises:
        ConfigError: DSI would not pay on these devices, and the user gave no numbers for it.
    """
    from specexec_cli.cli.fetching import fetch_first
    from specexec_cli.lab.bench.cases import Workers

    request = replace(request, method="dsi", dsi=wanted)
    fetch_first(request, yes=yes, quiet=quiet)
    session = opened(request, quiet=quiet)
    if session.method != "dsi":
        session.close()
        raise ConfigError(
            "DSI would not pay on these devices: say how many target servers to measure it with, "
            "`sp`"
        )
    settings = session.settings
    sp, lookahead = int(settings["sp"]), int(settings["lookahead"])
    return session, Workers(sp, lookahead, settings["device"], wanted.more_drafts)
