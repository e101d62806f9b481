"""Processes that have begun in a moment: forks of one that has imported what they need.

Importing it takes seconds of processor time in each that Python starts anew. Tests of how a program
starts, or of its memory, start it as its users do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["pytest", "specexec_cli.cli.main", "specexec_cli.cli.worker", "specexec_cli.engine.factory",
     "specexec_cli.hosts.worker", "specexec_cli.loading", "specexec_cli.session",
     "transformers.models.llama.modeling_llama"]
)  # fmt: skip


def _run(
    function: Callable[..., object], arguments: tuple[Any, ...], environment: Mapping[str, str],
    said: Connection, stream: int,
) -> None:  # fmt: skip
    os.dup2(said.fileno(), stream)
    said.close()
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


class Forked:
    """A process that calls a function, with what tests ask of a subprocess.Popen.

    Args:
        function: of a module that can be imported.
        environment: of the process.
        stream: whose text is heard: 1 is stdout, 2 stderr.
    """

    def __init__(
        self, function: Callable[..., object], *arguments: Any,
        environment: Mapping[str, str] = os.environ, stream: int = 1,
    ) -> None:  # fmt: skip
        heard, said = _SERVER.Pipe(duplex=False)
        self._process = _SERVER.Process(
            target=_run, args=(function, arguments, dict(environment), said, stream), daemon=True
        )
        self._process.start()
        said.close()
        self.heard = os.fdopen(os.dup(heard.fileno()), encoding="utf-8")
        heard.close()

    @property
    def returncode(self) -> int | None:
        """As subprocess has it: a signal that ended it is a number below 0."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends the process a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Ends it as the kernel does where memory runs out."""
        with suppress(ProcessLookupError):  # the fork server has found it dead already
            self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return self.returncode
