"""Runs code at full speed, past the count of lines.

scripts/test counts which lines of specexec_cli the tests run. Up to Python 3.11 that slows down all
that Python does, counted or not, several times. So it is left out where no line of specexec_cli
runs (Triton's interpreter, the code that writes kernels, tests/fake_cuda.py), and where thousands
of examples run lines that other tests count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def uncounted(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, run while nobody traces this thread."""

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # In this very frame: a tracer that has seen it begin is to see it end, or it would take the
        # lines of one frame for those of another.
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(tracer)
            _next_call()

    return run


def _next_call() -> None:
    """With a call, no sooner, a tracer is in place again."""
