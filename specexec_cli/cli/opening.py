"""Opens the session of a command, and shows a line, then a bar, while its models load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specexec_cli.cli.lean_imports import lean_imports
from specexec_cli.cli.live import PassingLine
from specexec_cli.cli.render import LoadingBar, notice
from specexec_cli.planning.request import Request

if TYPE_CHECKING:
    from specexec_cli.session import TextSession

SMALL_MODEL = "smollm2-360m-instruct"  # runs on any machine, and wants no accepted licence


def opened(request: Request, *, quiet: bool, shown: bool = True) -> TextSession:
    """Opens a session of models that are on this machine.

    Args:
        quiet: print no notices, and show neither line nor bar.
        shown: whether to show a line and a bar.
    """
    bar = LoadingBar(shown=shown and not quiet)
    with PassingLine(f"loading {request.model or 'the model'}", shown=shown and not quiet) as line:
        with lean_imports():
            from specexec_cli.session import open_session  # takes seconds: it imports torch

        def tell(text: str) -> None:
            line.hide()
            if not quiet:
                notice(text)

        def progress(done: int, total: int) -> None:
            line.hide()
            bar(done, total)

        try:
            return open_session(request, notice=tell, progress=progress)
        finally:
            bar.close()


def tell_of_demo(request: Request) -> None:
    """Says in one line that the demo writes, and how to get a real model, if none was named."""
    from specexec_cli.device import format_bytes
    from specexec_cli.planning.chosen_models import registry_of

    registry = registry_of(request)
    if request.model is not None or registry.used is not None:
        return
    size = registry.resolve(SMALL_MODEL).size_bytes or 0
    notice(
        "this is the demo, a toy that knows Python's standard library. For a real model "
        f"({format_bytes(size)}): specexec pull {SMALL_MODEL} && specexec use {SMALL_MODEL}"
    )
