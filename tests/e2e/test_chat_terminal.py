"""`specexec chat` in a terminal, on a session without models."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, PASTE, TAB, UP, Terminal

TOYS = str(Path(__file__).parents[1] / "chat_toys.py")
Start = Callable[..., Terminal]


def started(folder: Path, *options: str, lines: int = 24, **environment: str) -> Terminal:
    environment = {"XDG_STATE_HOME": str(folder), "PYTHONPATH": ".", **environment}
    terminal = Terminal([sys.executable, TOYS, *options], environment=environment, lines=lines)
    terminal.prompt()
    return terminal


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    terminals: list[Terminal] = []

    def run(*options: str, **settings: str) -> Terminal:
        terminals.append(started(tmp_path, *options, **settings))
        return terminals[-1]

    yield run
    for terminal in terminals:
        terminal.kill()


@pytest.fixture(scope="module")
def shared_chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """One running chat for every test that does not end it."""
    terminal = started(tmp_path_factory.mktemp("state"), "context_length=30000")
    yield terminal
    terminal.kill()


@pytest.fixture
def chat(shared_chat: Terminal) -> Terminal:
    shared_chat.ask("/clear")
    return shared_chat


def transcripts(folder: Path) -> list[Path]:
    return sorted((folder / "specexec" / "chats").glob("*.jsonl"))


def test_a_chat_from_the_first_message_to_ctrl_d(start: Start, tmp_path: Path) -> None:
    chat = start()
    assert "hello, world\nprompt 20 tok, first text" in chat.ask("say hello, world")
    # history: the last message comes back, is edited and sent
    assert "\nhello, world!\n" in chat.ask(UP, "!")
    chat.type(CTRL_D)
    assert chat.end() == 0
    (path,) = transcripts(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((path.parents[1] / "chat_history").stat().st_mode) == 0o600
    roles = [json.loads(line).get("role") for line in path.read_text().splitlines()]
    assert roles == [None, "user", "assistant", "user", "assistant"]


def test_commands_are_completed_and_corrected(chat: Terminal) -> None:
    chat.type("/se", TAB)  # the only command that fits
    chat.wait("> /set")
    chat.type(" temp", TAB)  # the only key
    chat.wait("> /set temperature=")
    assert "temperature  0.5" in chat.ask("0.5")
    assert "error: there is no command '/svae'. Did you mean '/save'?" in chat.ask("/svae x")


def test_messages_of_several_lines(chat: Terminal) -> None:
    assert chat.ask("two", ALT_ENTER, "lines").startswith("two\n… lines\nYou said 9 characters.")
    # neither Enter nor Alt-Enter sends an open block
    answer = chat.ask('"""a', ENTER, "b", ALT_ENTER, 'c"""')
    assert answer.startswith('"""a\n… b\n… c"""\nYou said 5 characters.')
    # Ctrl-C drops a block that was never closed; the line is free again
    chat.type('"""never closed', ENTER, "more")
    chat.wait("… more")
    chat.type(CTRL_C)
    assert "Enter breaks the line, Alt-Enter sends" in chat.ask("/multi")
    chat.type("x", ENTER, "y", ENTER, "z", ALT_ENTER)
    assert chat.prompt().startswith("x\n… y\n… z\nYou said 5 characters.")
    chat.type("/multi off", ALT_ENTER)
    assert "Enter sends" in chat.prompt()


def test_a_long_paste_arrives_whole(chat: Terminal) -> None:
    text = "\n".join("x" * 99 for _ in range(100))
    assert "You said 9999 characters." in chat.ask(PASTE.format(text))


def test_markdown_is_rendered_once_however_it_arrives(chat: Terminal) -> None:
    before = len(chat.written)
    assert chat.ask("markdown").split("\nprompt ")[0] == (
        "markdown\nA heading\n\n"
        "Some text with code and std::vector<int>, which runs on beyond eighty columns\n"
        "so that it wraps.\n\n"
        " • one\n • two\n\n"
        "```python\ndef double(x):\n    return 2 * x\n```\n\n"
        " name  value\n ───────────\n wide  漢字"
    )
    assert b"\x1b[1;4mA heading" in chat.written[before:], "styles on a terminal"
    assert b"\x1b[2J" not in chat.written[before:], "only lines that may change are redrawn"


def test_text_longer_than_the_screen_scrolls_up_whole(chat: Terminal) -> None:
    lines = chat.ask("lines 40").split("\n")
    assert lines[1:41] == [f"line {n}" for n in range(1, 41)]


def test_wide_and_combining_characters(chat: Terminal) -> None:
    assert "\n漢字かな 한글 é" in chat.ask("wide")
    assert "You said 1 characters." in chat.ask("漢字 é", "\x7f", "\x7f", "\x7f")


def test_control_characters_of_a_model_are_shown_not_obeyed(chat: Terminal) -> None:
    assert chat.ask("control").startswith("control\n␛[31mred␛[2J␇ text\nprompt ")


def test_thinking_is_dimmed_or_hidden(chat: Terminal) -> None:
    before = len(chat.written)
    assert chat.ask("think").startswith("think\nLet me see.\n\nThe answer is 42.\n")
    assert b"\x1b[2mL" in chat.written[before:]
    chat.ask("/set thinking=off")
    assert chat.ask("think").startswith("think\nThe answer is 42.\n")
    chat.ask("/set thinking=on")


def test_resizing_during_a_reply_keeps_its_text(chat: Terminal) -> None:
    chat.type("slow 40", ENTER)
    chat.wait("word2")
    chat.resize(24, 60)
    chat.wait("word20")
    chat.resize(24, 100)
    words = chat.prompt().split("\nprompt ")[0].split()
    chat.resize(24, 80)
    assert words == ["slow", "40", *(f"word{n}" for n in range(1, 41))]


def test_an_unwritable_path_is_one_line(chat: Terminal, tmp_path: Path) -> None:
    chat.ask("say hi")
    answer = chat.ask("/save /no/such/folder/x.jsonl")
    assert "error: cannot write /no/such/folder/x.jsonl: No such file or directory" in answer
    (tmp_path / "mine.txt").write_text("precious")
    answer = chat.ask(f"/save {tmp_path}/mine.txt")
    assert "exists and is not a transcript" in answer.replace("\n", " ")
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_ctrl_c_stops_the_reply_and_once_more_leaves(start: Start, tmp_path: Path) -> None:
    chat = start("layer_s=0.2")
    # before the first token: the message comes back
    chat.type("slow", ENTER)
    chat.wait("pass 1 · layer")
    chat.type(CTRL_C)
    chat.prompt()
    assert "stopped: nothing had come yet" in chat.text()
    chat.wait("> slow", 2)
    # later: what there is stays
    chat.type(ENTER)
    chat.wait("word2")
    chat.wait("· 21.3 GB/s · draft 118 nodes")
    chat.type(CTRL_C)
    answer = chat.prompt()
    assert "stopped: what there is counts as the reply. Ctrl-C again leaves" in answer
    assert "layer" not in answer, "the status line is gone"
    reply = json.loads(transcripts(tmp_path)[0].read_text().splitlines()[-1])
    assert reply["finish_reason"] == "interrupted"
    assert reply["content"].startswith("word1 word2")
    assert answer.startswith(f"slow\n{reply['content'].strip()}\nprompt ")
    # something was sent in between: it takes two again
    chat.ask("say more")
    chat.type(CTRL_C)
    chat.prompt()
    assert "Ctrl-C again leaves, and so does Ctrl-D" in chat.text()
    chat.type(CTRL_C)
    assert chat.end() == 130


def test_ctrl_c_twice_during_a_reply_leaves(start: Start, tmp_path: Path) -> None:
    chat = start()
    chat.type("stall", ENTER)  # in the first layer of the second pass
    chat.wait("word")
    chat.type(CTRL_C)
    chat.wait("stopping")
    chat.type(CTRL_C)
    assert chat.end() == 130
    reply = json.loads(transcripts(tmp_path)[0].read_text().splitlines()[-1])
    assert reply["role"] == "assistant"
    assert reply["content"].startswith("word")


def test_drafts_are_painted_and_no_color_is_heeded(start: Start) -> None:
    chat = start("show_drafts=1")
    chat.ask("say hello there")
    row = next(y for y, line in enumerate(chat.screen.display) if line.startswith("hello there"))
    cells = [chat.screen.buffer[row][x] for x in range(11)]
    assert [cell.fg for cell in cells[:4]] == ["green"] * 4
    assert (cells[4].fg, cells[4].bold) == ("brown", True), "pyte's name of ANSI yellow"
    plain = start("show_drafts=1", NO_COLOR="1")
    plain.ask("say hello there")
    colours = {cell.fg for row in plain.screen.buffer.values() for cell in row.values()}
    assert colours == {"default"}


def test_a_full_window_is_announced_and_compacted(start: Start) -> None:
    chat = start("context_length=200")
    assert "full" not in chat.ask("say " + "a" * 40)
    chat.type("say b" + "b" * 40, ENTER)
    chat.wait("drop the oldest turn to go on? [Y/n]")
    chat.type("n", ENTER)
    chat.prompt()
    assert "/compact or /clear makes room" in chat.text()
    chat.wait("> say b", 2)  # the message is back
    chat.type(ENTER)
    chat.wait("[Y/n]", 2)
    chat.type(ENTER)
    answer = chat.prompt()
    assert "dropped the oldest turn: the context window was full" in answer
    chat.ask("/clear")
    answer = chat.ask("say " + "c" * 80)
    assert "the context window is 8" in answer
    assert "/compact drops the oldest turns" in answer.replace("\n", " ")


def test_resume_after_kill_9_loses_the_unfinished_reply_only(start: Start, tmp_path: Path) -> None:
    chat = start("layer_s=0.01")
    chat.ask("say one")
    chat.type("slow two", ENTER)
    chat.wait("word1")
    chat.kill()
    (path,) = transcripts(tmp_path)
    with path.open("ab") as file:  # as if it had died in the middle of a line
        file.write(b'{"role": "assistant", "cont')
    again = start(f"resume={path}")
    screen = again.text()
    assert "the last line is broken and was left out" in screen
    assert "going on after 2 turns" in screen
    assert "the last message has no reply yet: send it again, or /regen" in screen
    again.wait("> slow two")
    again.type(CTRL_C)
    again.ask("say three")
    again.type(CTRL_D)
    assert again.end() == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("content") for line in lines if "role" in line] == [
        "say one", "one", "slow two", "say three", "three",
    ]  # fmt: skip
    assert {"drop": [2, 3]} in lines
