"""The command line in this process: the same main(), without three seconds of imports."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from specexec_cli.cli.main import main
from specexec_cli.core import StepResult
from specexec_cli.session import TextSession

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a mistake gets."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: "), self.err
        return lines[0].removeprefix("error: ")


class _Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, terminal: bool) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def run_cli(*argv: object, stdin: bytes | None = None) -> Ran:
    """specexec ARGV. `stdin` None is a terminal at which nobody types."""
    out, err = io.StringIO(), io.StringIO()
    keyboard = _Stdin(stdin or b"", terminal=stdin is None)
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", ["specexec", *map(str, argv)]),
        mock.patch.object(sys, "stdin", keyboard),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code: object = 0
        except SystemExit as error:
            code = error.code or 0
    assert isinstance(code, int)
    ran = Ran(code, out.getvalue(), err.getvalue())
    assert "Traceback" not in ran.err
    return ran


def breaks_off(patch: pytest.MonkeyPatch, error: type[BaseException] | BaseException) -> None:
    """Every text ends in this error behind its first step.

    Args:
        patch: undoes it.
    """
    generate = TextSession.generate

    def broken(session: TextSession, *asked: Any, **options: Any) -> Iterator[StepResult]:
        yield next(iter(generate(session, *asked, **options)))
        raise error

    patch.setattr(TextSession, "generate", broken)
