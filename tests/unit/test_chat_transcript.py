"""Transcripts: whole lines, private files, and what is left of a broken one."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from specexec_cli.chat.conversation import Conversation, Message
from specexec_cli.chat.transcript import Transcript, load, save
from specexec_cli.errors import ConfigError

TURN = [{"role": "user", "content": "Grüße 漢字\n\u2028"}, {"role": "assistant", "content": "Hi"}]


def written(path: Path, *records: dict[str, object]) -> Path:
    transcript = Transcript(path, "toy")
    for record in records or TURN:
        transcript.append(record)
    transcript.close()
    return path


def contents(conversation: Conversation) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in conversation.messages]


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = written(
        tmp_path / "new" / "chat.jsonl", {"role": "system", "content": "Be kind."}, *TURN
    )
    loaded = load(path)
    assert loaded.conversation.system == "Be kind."
    assert contents(loaded.conversation) == [(r["role"], r["content"]) for r in TURN]
    assert loaded.notice is None
    assert loaded.good_bytes == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["format"], first["version"], first["target"]) == ("specexec-chat", 1, "toy")


def test_an_open_file_is_made_private(tmp_path: Path) -> None:
    path = written(tmp_path / "chat.jsonl")
    path.chmod(0o644)
    transcript = Transcript(path, "toy", load(path).good_bytes)
    transcript.append({"role": "user", "content": "x"})
    transcript.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_dropped_messages_are_gone(tmp_path: Path) -> None:
    path = written(tmp_path / "chat.jsonl", *TURN, *TURN, {"drop": [0, 2]}, {"drop": [1, 2]})
    assert contents(load(path).conversation) == [("user", TURN[0]["content"])]


@pytest.mark.parametrize(
    "rest",
    [b'{"role": "assi', b"\xff\xfe", b"[]\n", b'{"role": "x"}\n', b"[" * 100_000 + b"\n",
     b'{"drop": [1' + b"0" * 5000 + b", 2]}\n"],
)  # fmt: skip
def test_a_broken_last_line_is_left_out_and_cut_off(tmp_path: Path, rest: bytes) -> None:
    path = written(tmp_path / "chat.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole + rest)
    loaded = load(path)
    assert contents(loaded.conversation) == [(r["role"], r["content"]) for r in TURN]
    assert loaded.notice == "chat.jsonl: the last line is broken and was left out"
    transcript = Transcript(path, "toy", loaded.good_bytes)
    transcript.append({"role": "user", "content": "on"})
    transcript.close()
    assert path.read_bytes() == whole + b'{"role": "user", "content": "on"}\n'


def test_every_cut_of_a_transcript_gives_its_whole_lines(tmp_path: Path) -> None:
    whole = written(tmp_path / "chat.jsonl").read_bytes()
    header = whole.index(b"\n") + 1
    path = tmp_path / "cut.jsonl"
    for length in range(header, len(whole) + 1):
        path.write_bytes(whole[:length])
        assert len(load(path).conversation.messages) == whole[header:length].count(b"\n")


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "chat.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    for broken in (b"oops", b"[" * 100_000):
        path.write_bytes(lines[0] + broken + b"\n" + lines[2])
        with pytest.raises(ConfigError, match=r"chat\.jsonl, line 2 is broken"):
            load(path)


@pytest.mark.parametrize("content", ["hello\nworld\n", '{"format": "other", "version": 1}\n', "[]"])
def test_another_file_is_no_transcript(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is not a transcript"):
        load(path)


def test_a_missing_transcript_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the transcript .*: No such file"):
        load(tmp_path / "none.jsonl")


def test_saving_replaces_a_transcript_and_nothing_else(tmp_path: Path) -> None:
    conversation = Conversation("s", [Message("user", "a"), Message("assistant", "b")])
    path = tmp_path / "saved.jsonl"
    save(path, conversation, "toy")
    conversation.messages.append(Message("user", "c"))
    save(path, conversation, "toy")
    loaded = load(path).conversation
    assert (loaded.system, contents(loaded)) == ("s", contents(conversation))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = tmp_path / "letter.txt"
    other.write_text("Dear")
    with pytest.raises(ConfigError, match="is not a transcript: choose another name"):
        save(other, conversation, "toy")
    with pytest.raises(ConfigError, match="cannot write"):
        save(tmp_path / "no" / "folder.jsonl", conversation, "toy")
    assert sorted(os.listdir(tmp_path)) == ["letter.txt", "saved.jsonl"], "nothing half-written"


def test_a_full_disk_is_an_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(OSError, match="No space left"):
        written(Path("/dev/full"))
