"""tests/uncounted.py: a tracer does not see the code that runs inside, and sees all other code."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from uncounted import uncounted


def before() -> None: ...


def inside() -> None: ...


def behind() -> None: ...


def seen_by_a_tracer(run: Callable[[], None]) -> list[str]:
    """Names of the functions above that a tracer sees begin while `run` runs."""
    found: list[str] = []

    def tracer(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code in (before.__code__, inside.__code__, behind.__code__):
            found.append(frame.f_code.co_name)
        return None

    counting, counting_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(tracer)
    threading.settrace(tracer)
    try:
        run()
    finally:
        sys.settrace(counting)
        threading.settrace(counting_threads)  # type: ignore[arg-type]  # None is nobody
    return found


def test_what_runs_inside_is_not_seen() -> None:
    @uncounted
    def outer() -> int:
        inside()
        nested()
        inside()
        return 7

    @uncounted
    def nested() -> None:
        inside()

    def run() -> None:
        before()
        assert outer() == 7
        behind()

    assert seen_by_a_tracer(run) == ["before", "behind"]


def test_an_exception_inside_passes_and_ends_the_pause() -> None:
    @uncounted
    def failing() -> None:
        inside()
        raise KeyError("found")

    def run() -> None:
        before()
        with pytest.raises(KeyError, match="found"):
            failing()
        behind()

    assert seen_by_a_tracer(run) == ["before", "behind"]


def test_threads_that_begin_meanwhile_are_seen() -> None:
    @uncounted
    def waiting() -> None:
        inside()
        thread = threading.Thread(target=before)
        thread.start()
        thread.join()

    assert seen_by_a_tracer(waiting) == ["before"]


def test_where_nobody_traces_nothing_changes() -> None:
    counting = sys.gettrace()
    sys.settrace(None)
    try:
        uncounted(inside)()
        assert sys.gettrace() is None
    finally:
        sys.settrace(counting)
