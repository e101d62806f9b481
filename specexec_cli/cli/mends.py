"""Which options to change when a session does not fit into memory: planning tells facts alone."""

from __future__ import annotations

from specexec_cli.errors import SpecexecError
from specexec_cli.planning.alternatives import Change, changes_that_fit
from specexec_cli.planning.memory import DoesNotFitError

_CONTEXT = "--max-tokens in generate and bench, --context elsewhere"
_SMALLER = "Use a smaller or quantized target: --target"
_SHORTER = f"Use a shorter context: {_CONTEXT}"
# where nothing is known but the part that takes the most memory
_MENDS = {
    "draft model": "Use a smaller draft model: --draft",
    "draft model's KV cache": _SHORTER,
    "target's KV cache": _SHORTER,
    "activations": f"Use a shorter context ({_CONTEXT}) or a smaller draft tree (--budget)",
}


def with_mend(error: SpecexecError) -> str:
    """The error's own words and, where planning left it to the command line, what to change."""
    if not isinstance(error, DoesNotFitError):
        return str(error)
    if error.asked is None:
        return f"{error}. {_MENDS.get(error.biggest, _SMALLER)}"
    asked = error.asked
    changes = [
        _described(change)
        for change in changes_that_fit(asked.request, asked.site, asked.context_tokens)
    ]
    if not changes:
        return f"{error}. {_SMALLER}"
    if len(changes) == 1:
        return f"{error}. It fits with {changes[0]}"
    return f"{error}. It fits with any of: {'; '.join(changes)}"


def _described(change: Change) -> str:
    if change.context_tokens is None:
        return change.options
    context = f"{change.context_tokens} tokens of prompt and text ({_CONTEXT})"
    return f"{change.options} and {context}" if change.options else context
