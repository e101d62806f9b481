"""Sessions of the commands that measure: one beside another, memory planned for their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specexec_cli.cli import option_groups, options
from specexec_cli.cli.fetching import fetch_first
from specexec_cli.config import DsiOptions
from specexec_cli.errors import ConfigError

if TYPE_CHECKING:
    from specexec_cli.lab.bench.cases import Workers
    from specexec_cli.lab.bench.datasets import Dataset
    from specexec_cli.planning.request import Request
    from specexec_cli.session import TextSession


def measured_request(
    models: option_groups.MeasuredModels,
    sets: Sequence[Dataset],
    max_tokens: int,
    several_drafts: bool = False,
) -> Request:
    """The models, with memory planned for the longest of these prompts."""
    prompts = [prompt for one in sets for prompt in one.prompts]
    turns = max((len(prompt.messages) for prompt in prompts), default=1)
    text = max((prompt.text for prompt in prompts), key=len, default="")
    # a chat template adds some tokens to each turn
    beside = (1 + turns) * options.TEMPLATE_TOKENS + max_tokens
    return models.request(text, beside, several_drafts)


def opened(request: Request, quiet: bool) -> TextSession:
    """A session of models that are on this machine, with a bar while it loads."""
    from specexec_cli.cli.render import LoadingBar, notice
    from specexec_cli.session import open_session

    bar = LoadingBar(shown=not quiet)
    try:
        return open_session(
            request, notice=(lambda line: None) if quiet else notice, progress=bar,
        )  # fmt: skip
    finally:
        bar.close()


def open_models(
    models: option_groups.MeasuredModels, sets: Sequence[Dataset], max_tokens: int, quiet: bool
) -> TextSession:
    """A session with memory planned for the longest of these prompts, and a bar while it loads."""
    request = measured_request(models, sets, max_tokens)
    fetch_first(request, yes=models.yes, quiet=quiet)
    return opened(request, quiet)


def open_distributed(
    request: Request, wanted: DsiOptions, yes: bool, quiet: bool
) -> tuple[TextSession, Workers]:
    """A session of the method dsi beside the other, and how it runs.

    Raises:
        ConfigError: DSI would not pay on these devices, and nobody has said how to run it.
    """
    from specexec_cli.lab.bench.cases import Workers

    request = replace(request, method="dsi", dsi=wanted)
    fetch_first(request, yes=yes, quiet=quiet)
    session = opened(request, quiet)
    if session.method != "dsi":
        session.close()
        raise ConfigError(
            "DSI would not pay on these devices: say how many target servers to measure it with, "
            "`sp`"
        )
    settings = session.settings
    place = settings["device"] if wanted.ray is None else f"ray {wanted.ray}"
    sp, lookahead = int(settings["sp"]), int(settings["lookahead"])
    return session, Workers(sp, lookahead, place, wanted.more_drafts)
