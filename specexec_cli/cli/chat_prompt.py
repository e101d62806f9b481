"""The input line of a chat: editing, history, messages of several lines, completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import AnyFormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style

from specexec_cli.chat.chat import Chat
from specexec_cli.chat.commands import COMMANDS
from specexec_cli.chat.quoted import is_open
from specexec_cli.chat.settings import KEYS

_PROMPT: AnyFormattedText = [("", "\n"), ("bold", "> ")]
_FILE_COMMANDS = ("/save ", "/load ", "/read ")


class Prompt:
    """Reads messages from a terminal."""

    interactive = True

    def __init__(self, history: Path | None) -> None:
        """Opens the history.

        Args:
            history: file of earlier messages; None keeps messages only in memory.
        Raises:
            OSError: the file cannot be written.
        """
        self._multi = False
        style = [("placeholder", "#808080")] if "NO_COLOR" not in os.environ else []
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            multiline=True,
            key_bindings=self._bindings(),
            completer=CommandCompleter(),
            complete_while_typing=False,
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else "… ",
            output=create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr),
            style=Style(style),
        )

    def read(self, chat: Chat) -> str | None:
        """The next message or command; None at Ctrl-D.

        Raises:
            KeyboardInterrupt: Ctrl-C on an empty line.
        """
        self._multi = chat.multi
        default, chat.prefill = chat.prefill, ""
        hint = "Alt-Enter sends" if chat.multi else "Send a message (/help lists commands)"

        def placeholder() -> AnyFormattedText:
            # afterwards only the message stays on the screen
            return "" if get_app().is_done else [("class:placeholder", hint)]

        try:
            return self._session.prompt(_PROMPT, default=default, placeholder=placeholder)
        except EOFError:
            return None

    def _bindings(self) -> KeyBindings:
        bindings = KeyBindings()

        multi = Condition(lambda: self._multi)
        breaks_line = multi | Condition(lambda: is_open(self._session.default_buffer.text))

        @bindings.add("enter", filter=breaks_line)
        @bindings.add("escape", "enter", filter=~multi)
        def _break(event: KeyPressEvent) -> None:
            event.current_buffer.newline(copy_margin=False)

        @bindings.add("enter", filter=~breaks_line)
        @bindings.add("escape", "enter", filter=multi)
        def _send(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @bindings.add("c-c")
        @bindings.add("<sigint>")
        def _interrupt(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt)

        return bindings


class CommandCompleter(Completer):
    """Completes commands, the keys of /set, and file names."""

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """Completions of the word before the cursor."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        command, space, argument = text.partition(" ")
        if not space:
            for known in COMMANDS:
                if known.name.startswith(command[1:]):
                    yield Completion(f"/{known.name}", -len(command), display_meta=known.help)
        elif text.startswith(_FILE_COMMANDS):
            files = Document(argument, len(argument))
            yield from PathCompleter(expanduser=True).get_completions(files, event)
        elif command == "/set" and "=" not in argument:
            for key in KEYS:
                if key.startswith(argument):
                    yield Completion(f"{key}=", -len(argument))
        elif command == "/draft":
            for word in ("on", "off"):
                if word.startswith(argument):
                    yield Completion(word, -len(argument))


def _history(path: Path | None) -> History:
    """The history, in a file that only its owner can read, or in memory."""
    if path is None:
        return InMemoryHistory()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return FileHistory(str(path))
