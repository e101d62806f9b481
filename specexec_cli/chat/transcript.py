"""The transcript: one JSON object a line, each appended with a single write as the chat goes on.

    {"format": "specexec-chat", "version": 1, "target": "demo-target", "created": "..."}
    {"role": "system", "content": "..."}           replaces the system prompt; null removes it
    {"role": "user", "content": "..."}
    {"role": "assistant", "content": "...", "finish_reason": "eos", ...}
    {"drop": [2, 4]}                               messages 2 and 3 are gone (undo, compact, ...)

At whatever moment the program dies, every line but the last is whole. A broken last line is left
out when the file is read.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specexec_cli.chat.conversation import Conversation, Message
from specexec_cli.errors import ConfigError
from specexec_cli.guarded import parse_json
from specexec_cli.kept import replacing

FORMAT, VERSION = "specexec-chat", 1
_HEADER_BYTES = 10_000  # more than any first line has


class Transcript:
    """Appends records to a file of mode 0600; the file appears with the first record."""

    def __init__(self, path: Path, target: str, good_bytes: int = 0) -> None:
        """Opens nothing yet.

        Args:
            target: name of the target, for the first line.
            good_bytes: bytes of an existing file to keep; see Loaded.
        """
        self.path = path
        self._target = target
        self._good_bytes = good_bytes
        self._file: int | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record; it is on the disk when this returns.

        Raises:
            OSError: the record could not be written whole.
        """
        if self._file is None:
            self._file = self._open()
        _write_line(self._file, record)

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.fstat(file).st_size == 0:
            _write_line(file, header(self._target))
        else:
            os.fchmod(file, 0o600)
            os.ftruncate(file, self._good_bytes)  # cuts a broken last line off
        return file

    def close(self) -> None:
        """Closes the file; idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def header(target: str) -> dict[str, Any]:
    """The first record of a transcript."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"format": FORMAT, "version": VERSION, "target": target, "created": created}


def records(conversation: Conversation) -> list[dict[str, Any]]:
    """The records of a conversation as it stands, without its history."""
    lines: list[dict[str, Any]] = []
    if conversation.system is not None:
        lines.append({"role": "system", "content": conversation.system})
    return lines + [{"role": m.role, "content": m.content} for m in conversation.messages]


def save(path: Path, conversation: Conversation, target: str) -> None:
    """Writes the conversation as it stands; readers see the old file or the new one, whole.

    Raises:
        ConfigError: the file cannot be written, or exists and is not a transcript.
    """
    if path.exists() and not _is_transcript(path):
        raise ConfigError(f"{path} exists and is not a transcript: choose another name")
    try:
        with replacing(path) as partial:
            file = os.open(partial, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for record in [header(target), *records(conversation)]:
                    _write_line(file, record)
            finally:
                os.close(file)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a transcript file holds."""

    conversation: Conversation  # as it stood at the end
    good_bytes: int  # of the file without a broken last line
    notice: str | None  # tells the user of a broken last line


def load(path: Path) -> Loaded:
    """Reads a transcript, up to a broken last line if there is one.

    Raises:
        ConfigError: the file is no transcript, cannot be read, or is broken before its last line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read the transcript {path}: {error.strerror}") from error
    conversation = Conversation()
    good_bytes = 0
    last = len(lines) - 1  # after the last line break: empty, or a line that was cut off
    for number, line in enumerate(lines):
        if not line and number == last:
            break
        try:
            record = parse_json(line)
            if number == last:
                raise ValueError("its line break is missing")
            _apply(record, conversation, first=number == 0)
        except (ValueError, TypeError, KeyError) as error:
            if number == 0:
                raise ConfigError(f"{path} is not a transcript of specexec chat") from error
            if any(lines[number + 1 :]):
                raise ConfigError(
                    f"{path}, line {number + 1} is broken ({error}): mend or delete that line"
                ) from error
            notice = f"{path.name}: the last line is broken and was left out"
            return Loaded(conversation, good_bytes, notice)
        good_bytes += len(line) + 1
    return Loaded(conversation, good_bytes, None)


def _apply(record: Any, conversation: Conversation, *, first: bool) -> None:
    """Replays one record.

    Raises:
        ValueError, TypeError, KeyError: it is not a record.
    """
    if first:
        if record["format"] != FORMAT or record["version"] != VERSION:
            raise ValueError("of another format or version")
    elif "drop" in record:
        start, stop = record["drop"]
        del conversation.messages[start:stop]
    else:
        role, content = record["role"], record["content"]
        if role == "system" and (content is None or isinstance(content, str)):
            conversation.system = content
        elif role in ("user", "assistant") and isinstance(content, str):
            conversation.messages.append(Message(role, content))
        else:
            raise ValueError("neither a message nor a change")


def _is_transcript(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return bool(parse_json(file.readline(_HEADER_BYTES))["format"] == FORMAT)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _write_line(file: int, record: Mapping[str, Any]) -> None:
    line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    if os.write(file, line) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file)
