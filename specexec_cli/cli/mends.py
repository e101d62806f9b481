"""Errors as the command line tells them: settings as options, and which to change for memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from specexec_cli.cli.panels import SETTINGS
from specexec_cli.errors import SpecexecError

if TYPE_CHECKING:
    from specexec_cli.planning.alternatives import Change

_SETTING = re.compile(r"`([a-z_]+)(?:='([^'`]*)'|=(\d+))?`")
_RENAMED = {"max_depth": "depth"}  # settings whose options have other names
_CONTEXT = "--max-tokens in generate and bench, --context elsewhere"
_SMALLER = "Use a smaller or quantized model"
_SHORTER = f"Use a shorter context: {_CONTEXT}"
# where nothing is known but the part that takes the most memory
_MENDS = {
    "draft model": "Use a smaller draft model: --draft",
    "draft model's KV cache": _SHORTER,
    "target's KV cache": _SHORTER,
    "keys and values": _SHORTER,
    "scores of draft nodes": "Use a smaller draft tree: --budget",
    "activations": f"Use a shorter context ({_CONTEXT}) or a smaller draft tree (--budget)",
}


def with_options(text: str) -> str:
    """The text of an error or notice with options in the place of its settings (see errors.py)."""

    def option(match: re.Match[str]) -> str:
        name = _RENAMED.get(match[1], match[1])
        if name not in SETTINGS:  # quoted of another library's error
            return match[0]
        value = match[2] if match[2] is not None else match[3]
        return _option(name, value)

    return _SETTING.sub(option, text)


def with_mend(error: SpecexecError) -> str:
    """The error's own words with options and, where planning left it open, what to change."""
    from specexec_cli.planning.alternatives import changes_that_fit
    from specexec_cli.planning.memory import DoesNotFitError
    from specexec_cli.planning.resolve import RequestDoesNotFitError

    told = with_options(str(error))
    if isinstance(error, RequestDoesNotFitError):
        asked = error.asked
        changes = [
            _described(change)
            for change in changes_that_fit(asked.request, asked.site, asked.context_tokens)
        ]
        if not changes:
            return f"{told}. {_SMALLER}"
        if len(changes) == 1:
            return f"{told}. It fits with {changes[0]}"
        return f"{told}. It fits with any of: {'; '.join(changes)}"
    if isinstance(error, DoesNotFitError):
        return f"{told}. {_MENDS.get(error.biggest, _SMALLER)}"
    return told


def _option(name: str, value: str | int | None) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is None else f"{flag} {value}"


def _described(change: Change) -> str:
    options = " ".join(_option(name, value) for name, value in change.settings)
    if change.context_tokens is None:
        return options
    context = f"{change.context_tokens} tokens of prompt and text ({_CONTEXT})"
    return f"{options} and {context}" if options else context
