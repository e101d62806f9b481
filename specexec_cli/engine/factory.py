"""Opens the engine that suits a session."""

from __future__ import annotations

from specexec_cli.engine.batched import Batched
from specexec_cli.engine.one_at_a_time import OneAtATime
from specexec_cli.engine.text import Engine
from specexec_cli.session.local_session import LocalSession
from specexec_cli.session.text_session import TextSession


def open_engine(session: TextSession, *, slots: int = 1, most_waiting: int) -> Engine:
    """An engine over a session. Until the engine is closed, only it may use the session.

    Args:
        session: with memory planned for `slots` texts.
        slots: most texts at once (Request.slots); a session with its models in workers runs one.
        most_waiting: most texts that may wait.
    Raises:
        ConfigError: the session's policy cannot size the trees of several texts.
    """
    if slots > 1 and isinstance(session, LocalSession):
        return Batched(session, slots=slots, most_waiting=most_waiting)
    return OneAtATime(session, most_waiting=most_waiting)
