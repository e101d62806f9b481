"""Renders chat templates in a process of their own, which runs template_worker.py."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from specexec_cli.errors import CheckpointError, ConfigError
from specexec_cli.guarded import parse_json
from specexec_cli.models import template_worker

_MOST_S = 5.0
_MOST_BYTES = 512 << 20
_MOST_CHARACTERS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A chat template, and the tokens that stay plain text when a message spells them.

    Attributes:
        model: the model's name, for errors.
        source: the template, in Jinja.
        special: tokens that stay text in every message.
        named: tokens that stay text in all messages except the model's own, because the model
            writes these tokens itself.
    """

    model: str
    source: str
    special: Sequence[str] = ()
    named: Sequence[str] = ()


class Templates:
    """A process that renders templates one after another; started at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self._ready = False

    def render(
        self,
        template: Template,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Renders a conversation up to the start of the reply; may be called from any thread.

        Args:
            variables: the template's variables besides messages and tools.
        Returns:
            the text; tokens that a message spells are between template_worker's marks.
        Raises:
            ConfigError: the template refuses these messages.
            CheckpointError: the template takes too long, or too much text or memory.
        """
        line = json.dumps(
            {
                "messages": messages, "tools": tools, "template": template.source,
                "variables": variables, "special": template.special,
                "named": template.named, "most_s": _MOST_S, "most_bytes": _MOST_BYTES,
                "most_characters": _MOST_CHARACTERS,
            }
        )  # fmt: skip
        with self._lock:
            answer = self._asked(line)
        if "refuses" in answer:
            raise ConfigError(
                f"the chat template of {template.model} refuses this conversation: "
                f"{answer['refuses']}"
            )
        if "exceeds" in answer:
            raise CheckpointError(
                f"the chat template of {template.model} {answer['exceeds']} for this conversation: "
                "use another copy of the model, or continue text: generate with `raw`"
            )
        return answer["text"]

    def start(self) -> None:
        """Starts the process in advance, so that the first conversation need not wait for it."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """Ends the process, also in the middle of a template; idempotent."""
        if (process := self.process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            self._end()
            self._ready = False
            quiet = {"TRANSFORMERS_VERBOSITY": "error", "OPENBLAS_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-P", template_worker.__file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={**os.environ, **quiet}, encoding="utf-8",
                start_new_session=True,  # Ctrl-C must not reach it
            )  # fmt: skip
        return self.process

    def _asked(self, line: str) -> dict[str, str]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        if not self._ready and process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the process of chat templates ended with {process.wait()}")
        self._ready = True
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        if answer := process.stdout.readline():
            try:
                found: dict[str, str] = parse_json(answer)
            except ValueError as error:  # a message may hold half of a character (a lone surrogate)
                return {"refuses": str(error)}
            return found
        code = process.wait()
        self._end()
        if code == -signal.SIGPROF:
            return {"exceeds": f"takes more than {_MOST_S:g} s"}
        return {"exceeds": f"ends its process ({code})"}

    def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()


@cache
def shared() -> Templates:
    """The process that all users of this program's templates share."""
    templates = Templates()
    atexit.register(templates.close)
    return templates
