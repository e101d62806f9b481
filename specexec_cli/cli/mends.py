"""Which option to change when a session does not fit into memory: planning tells facts alone."""

from __future__ import annotations

from specexec_cli.errors import SpecexecError
from specexec_cli.planning.memory import DoesNotFitError

_CONTEXT = "--max-tokens in generate and bench, --context elsewhere"
_SHORTER = f"Use a shorter context: {_CONTEXT}"
# by the part that takes the most memory
_MENDS = {
    "draft model": "Use a smaller draft model: --draft",
    "draft model's KV cache": _SHORTER,
    "target's KV cache": _SHORTER,
    "activations": f"Use a shorter context ({_CONTEXT}) or a smaller draft tree (--budget)",
    "target in VRAM": "Stream the target: --offload auto",
    "target in RAM": "Stream it from SSD instead: --offload ssd",
}


def with_mend(error: SpecexecError) -> str:
    """The error's own words and, where planning left it to the command line, what to change."""
    if not isinstance(error, DoesNotFitError):
        return str(error)
    mend = _MENDS.get(error.biggest, "Use a smaller or quantized target: --target")
    return f"{error}. {mend}"
