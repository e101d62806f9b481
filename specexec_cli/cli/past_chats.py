"""Finds and lists the transcripts of past chats in the state folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from platformdirs import user_state_path

from specexec_cli.chat.conversation import Message
from specexec_cli.chat.transcript import load
from specexec_cli.errors import ConfigError, UnknownModelError

_SHOWN_MESSAGES = 2  # last messages shown when a chat goes on
_SHOWN_LINES = 6  # lines shown of each of these messages


def state_folder() -> Path:
    """The folder of transcripts and of the input history."""
    return user_state_path("specexec", appauthor=False)


def last_chat() -> Path:
    """The transcript that was changed last.

    Raises:
        UnknownModelError: there is no transcript.
    """
    found = next(_transcripts(), None)
    if found is None:
        raise UnknownModelError(f"there is no chat to continue in {state_folder() / 'chats'}")
    return found


def listed_chats() -> list[str]:
    """One line per chat, the latest last: its file, number of turns, and beginning."""
    lines = []
    for path in _transcripts():
        try:
            conversation = load(path).conversation
        except ConfigError as error:
            lines.append(f"{path}  (cannot be read: {error})")
            continue
        turns = len(conversation.turn_starts)
        first = next((message for message in conversation.messages), None)
        words = " ".join(first.content.split())[:50] if first else ""
        lines.append(f"{path}  {turns} turn{'' if turns == 1 else 's'}  {words}".rstrip())
    return lines[::-1]


def end_of(messages: Sequence[Message]) -> list[str]:
    """The lines of a chat's last messages, shortened."""
    lines = []
    for message in messages[-_SHOWN_MESSAGES:]:
        text = message.content.strip().splitlines() or [""]
        cut = len(text) > _SHOWN_LINES
        if message.role == "user":
            lines += [f"> {line}" for line in text[:_SHOWN_LINES]]
        else:
            # of a reply, the end is shown: the chat goes on from there
            lines += ["..."] * cut + text[-_SHOWN_LINES:]
    return lines


def _transcripts() -> Iterator[Path]:
    paths = (path for path in (state_folder() / "chats").glob("*.jsonl") if path.is_file())
    return iter(sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True))
