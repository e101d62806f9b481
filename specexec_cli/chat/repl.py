"""The loop of a chat: read a message or a command, do it, show errors as one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Protocol

from specexec_cli.chat.chat import Chat
from specexec_cli.chat.commands import run_command
from specexec_cli.chat.quoted import is_open, unquoted
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, ConfigError, SpecexecError

_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".heic", ".tiff")


class Source(Protocol):
    """Where the user's messages come from: a terminal's prompt, or a script on stdin."""

    interactive: bool  # somebody is typing

    def read(self, chat: Chat) -> str | None:
        """The next message or command, None at the end.

        Raises:
            KeyboardInterrupt: Ctrl-C with nothing typed.
        """


class Script:
    '''Standard input that is not a terminal: each line is a turn, or a """ block is one.'''

    interactive = False

    def __init__(self) -> None:
        self._lines = self._decoded()

    def _decoded(self) -> Iterator[str]:
        if sys.stdin is None:  # closed by whoever started this program
            return
        for number, line in enumerate(sys.stdin.buffer, start=1):
            try:
                yield line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"standard input, line {number}, is not UTF-8 text (byte {error.start + 1}): "
                    "convert it, for example with iconv"
                ) from error

    def read(self, chat: Chat) -> str | None:
        """The next message or command; None at the end of the input."""
        text = next(self._lines, None)
        while text is not None and is_open(text):
            line = next(self._lines, None)
            if line is None:
                chat.screen.notice('the last """ block is not closed: it is sent as it is')
                break
            text += "\n" + line
        return text


def run(chat: Chat, source: Source) -> int:
    """Runs the chat to its end.

    Returns:
        The exit code: 0, 130 after two Ctrl-C, or in a script that of the first error.
    """
    first_error = 0
    while not chat.leaving:
        try:
            line = source.read(chat)
            if line is None:
                break
            chat.interrupted = False
            if line.strip():
                if not source.interactive:
                    chat.screen.echo(line)
                handle(chat, line)
        except KeyboardInterrupt:
            if chat.interrupted or not source.interactive:
                return INTERRUPTED_EXIT_CODE
            chat.interrupted = True
            chat.screen.notice("Ctrl-C again leaves, and so does Ctrl-D")
        except SpecexecError as error:
            chat.screen.error(str(error))
            first_error = first_error or error.exit_code
        if chat.interrupted and not source.interactive:
            return INTERRUPTED_EXIT_CODE
    return 0 if source.interactive else first_error


def is_command(line: str) -> bool:
    """Whether a line is a command; a line that begins with a path, as /etc/hosts, is a message."""
    return line.startswith("/") and "/" not in line[1:].partition(" ")[0]


def handle(chat: Chat, line: str) -> None:
    """Does what one message or command asks for."""
    if is_command(line):
        run_command(chat, line)
    elif (text := unquoted(line)) or chat.attached:
        if picture := _picture(text):
            chat.screen.notice(f"pictures are not read: the model gets only the text '{picture}'")
        chat.send(text)


def _picture(text: str) -> str | None:
    """A word that is the path of a picture; None if there is none."""
    words = (word.strip("'\"`()<>,;:?!").rstrip(".") for word in text.split())
    pictures = (word for word in words if word.lower().endswith(_PICTURES))
    return next((word for word in pictures if os.path.isfile(os.path.expanduser(word))), None)
