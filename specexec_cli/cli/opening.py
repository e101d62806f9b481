"""Opens the session of a command, and shows a bar while its models load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specexec_cli.cli.render import LoadingBar, notice
from specexec_cli.planning.request import Request

if TYPE_CHECKING:
    from specexec_cli.session import TextSession


def opened(request: Request, *, quiet: bool, shown: bool = True) -> TextSession:
    """Opens a session of models that are on this machine.

    Args:
        quiet: print no notices, and show no bar.
        shown: whether to show a bar.
    """
    from specexec_cli.session import open_session

    bar = LoadingBar(shown=shown and not quiet)
    tell = (lambda line: None) if quiet else notice
    try:
        return open_session(request, notice=tell, progress=bar)
    finally:
        bar.close()
