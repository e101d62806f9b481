"""Text that grows: thinking parts, blocks, and lines that are settled once."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from chat_toys import MARKDOWN
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from specexec_cli.chat.quoted import is_open, unquoted
from specexec_cli.chat.thinking import Part, ThinkSplitter
from specexec_cli.cli.chat_text import GrowingText, MarkdownText, PlainText

SAMPLE = MARKDOWN + "\n1. first\n2. second\n\n> quoted\n\n---\n\nlast words\nof two lines"


def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)


def fed(text: GrowingText, pieces: list[str], room: int) -> list[str]:
    """Every line that is settled, when the screen holds `room` lines."""
    lines: list[str] = []
    for piece in pieces:
        text.add(Part(piece, thinking=False))
        lines += text.settle()
        tail = text.tail()
        lines += text.overflow(max(0, len(tail) - room))
        assert text.tail() == tail[max(0, len(tail) - room) :]
    return lines + text.settle(everything=True)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


@settings(deadline=None, max_examples=30)
@given(places=st.lists(st.integers(0, 1000), max_size=60))
def test_markdown_settles_to_the_same_lines_however_it_arrives(places: list[int]) -> None:
    whole = fed(MarkdownText(console(), lambda: 60), [SAMPLE], 1000)
    assert fed(MarkdownText(console(), lambda: 60), cut(SAMPLE, places), 1000) == whole


@settings(deadline=None, max_examples=30)
@given(places=st.lists(st.integers(0, 1000), max_size=60), room=st.integers(1, 50))
@example(places=[228], room=1)  # a line break that arrives alone
def test_plain_text_settles_to_the_same_lines_however_it_arrives(
    places: list[int], room: int
) -> None:
    def text() -> PlainText:
        return PlainText(console(), lambda: 30, lambda part: "none")

    sample = "one two three\n\n" + "word " * 40 + "\n  indented\n\n\nend"
    # a space at the very end of a line is not shown, so widths agree
    assert fed(text(), cut(sample, places), room) == fed(text(), [sample], 1000)


def test_a_block_taller_than_the_screen_loses_no_line() -> None:
    code = "```\n" + "\n".join(f"line {n}" for n in range(40)) + "\n```\n"
    pieces = [code[i : i + 7] for i in range(0, len(code), 7)]
    lines = fed(MarkdownText(console(), lambda: 60), pieces, 5)
    text = "\n".join(lines)
    assert [text.count(f"line {n}\n") + text.endswith(f"line {n}") for n in range(40)] == [1] * 40


@given(places=st.lists(st.integers(0, 100), max_size=30), opened=st.booleans())
def test_thinking_is_told_apart_however_it_arrives(places: list[int], opened: bool) -> None:
    text = ("" if opened else "Hm. <think>\n") + "a < b\n</think>\n\nYes, <thing>."
    splitter = ThinkSplitter("...<|assistant|><think>\n" if opened else "")
    parts = [part for piece in cut(text, places) for part in splitter.push(piece)]
    parts += splitter.finish()
    assert "".join(p.text for p in parts if p.thinking) == "a < b\n"
    answer = "".join(p.text for p in parts if not p.thinking)
    assert answer == ("" if opened else "Hm. ") + "Yes, <thing>."


@pytest.mark.parametrize(
    ("text", "open_", "message"),
    [
        ('"""', True, ""),
        ('"""a', True, "a"),
        ('"""a\nb"""', False, "a\nb"),
        ('"""\na\n"""', False, "a"),
        ('""""""', False, ""),
        ('"""/not a command"""', False, "/not a command"),
        ('say """x', False, 'say """x'),
        ("  plain ", False, "plain"),
    ],
)
def test_blocks(text: str, open_: bool, message: str) -> None:
    assert is_open(text) is open_
    assert unquoted(text) == message
