"""--continue, --list, lines that begin with a path, and options without effect."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_runner import run_cli

from specexec_cli.chat.conversation import Message
from specexec_cli.chat.repl import is_command
from specexec_cli.cli.past_chats import end_of


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "specexec" / "chats"


def chat(*argv: str, message: str = "What does dict.get do?"):
    return run_cli("chat", "--max-tokens", 8, *argv, stdin=f"{message}\n".encode())


def test_the_last_chat_goes_on_and_all_are_listed(state: Path) -> None:
    none = chat("--continue")
    assert none.code == 3
    assert "there is no chat to continue in" in none.error
    none = run_cli("chat", "--list")
    assert (none.code, none.out) == (0, "")
    assert none.err.startswith("no chats yet in ")
    assert chat().code == 0
    (first,) = state.glob("*.jsonl")
    assert chat(message="And list.append?").code == 0
    os.utime(first)  # the other one is older now
    assert chat("--continue", message="And list.pop?").code == 0
    listed = run_cli("chat", "--list").out.splitlines()
    assert len(listed) == 2
    assert listed[-1] == f"{first}  2 turns  What does dict.get do?"
    assert listed[0].endswith("1 turn  And list.append?")
    (state / "broken.jsonl").write_text("no\n")
    (state / "deep.jsonl").write_text("[" * 100_000)
    (state / "gone.jsonl").symlink_to(state / "nowhere")
    os.mkfifo(state / "pipe.jsonl")
    assert run_cli("chat", "--list").out.count("(cannot be read: ") == 2
    both = chat("--continue", "--resume", str(first))
    assert both.error == "give either --continue or --resume, not both"


def test_the_end_of_a_chat_is_short() -> None:
    reply = "\n".join(f"line {n}" for n in range(9))
    assert end_of([]) == []
    asked = Message("user", "a\nb")
    assert end_of([Message("user", "old"), asked, Message("assistant", reply)]) == [
        "> a", "> b", "...", *(f"line {n}" for n in range(3, 9)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "command"),
    [("/help", True), ("/set temperature=1", True), ("/halp", True), ("/save a/b", True),
     ("/etc/hosts", False), ("/usr/bin/env python: what is it?", False), ("hello", False)],
)  # fmt: skip
def test_a_line_that_begins_with_a_path_is_text(line: str, command: bool) -> None:
    assert is_command(line) == command


@pytest.mark.parametrize(
    ("argv", "told"),
    [(("--sp", "2"), "--sp has no effect without --method dsi"),
     (("--method", "autoregressive", "--budget", "8"), "--budget has no effect without draft"),
     (("--method", "autoregressive", "--no-calibration"), "--no-calibration has no effect"),
     (("--method", "dsi", "--depth", "8"), "--depth has no effect where DSI runs"),
     (("--seed", "3"), "--seed has no effect at --temperature 0"),
     (("--top-p", "0.9"), "--top-p has no effect at --temperature 0"),
     (("--method", "autoregressive", "--draft", "demo-draft"), "--draft has no effect with")],
)  # fmt: skip
def test_an_option_without_effect_is_a_notice(argv: tuple[str, ...], told: str) -> None:
    ran = run_cli("generate", "x", "--max-tokens", 2, *argv)
    assert ran.code == 0
    assert ran.err.startswith(f"notice: {told}")
    assert run_cli("generate", "x", "--max-tokens", 2, "-q", *argv).err == ""


def test_options_that_have_an_effect_are_not_told() -> None:
    argv = ("--budget", 4, "--temperature", 0.5, "--seed", 3, "--top-k", 9)
    ran = run_cli("generate", "x", "-m", "demo", "--max-tokens", 2, *argv)
    assert ran.err == "notice: cut at 2 tokens: --max-tokens 4 allows more\n"
