"""Opens the engine that a session calls for."""

from __future__ import annotations

from specexec_cli.engine.one_at_a_time import OneAtATime
from specexec_cli.engine.text import Engine
from specexec_cli.session.text_session import TextSession


def open_engine(session: TextSession, *, most_waiting: int) -> Engine:
    """An engine over a session, which nobody else uses until the engine is closed.

    Args:
        most_waiting: texts that may wait for their turn.
    """
    return OneAtATime(session, most_waiting=most_waiting)
