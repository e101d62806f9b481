"""Opens the engine that a session calls for."""

from __future__ import annotations

from specexec_cli.engine.batched import Batched
from specexec_cli.engine.one_at_a_time import OneAtATime
from specexec_cli.engine.text import Engine
from specexec_cli.session.local_session import LocalSession
from specexec_cli.session.text_session import TextSession


def open_engine(session: TextSession, *, slots: int = 1, most_waiting: int) -> Engine:
    """An engine over a session, which nobody else uses until the engine is closed.

    Args:
        slots: texts at once, for which the session's memory was planned (Request.slots); a
            session whose models are in workers runs one.
        most_waiting: texts that may wait for their turn.
    Raises:
        ConfigError: the session's policy cannot size the trees of several texts.
    """
    if slots > 1 and isinstance(session, LocalSession):
        return Batched(session, slots=slots, most_waiting=most_waiting)
    return OneAtATime(session, most_waiting=most_waiting)
