"""Replies split into answer, thinking and calls, however the text arrives."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexec_cli.serve.bodies import Tool
from specexec_cli.serve.reply import ReplyText, Said
from specexec_cli.serve.tool_dialects import HERMES, LLAMA
from specexec_cli.serve.tools import Dialect

TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name}})
    for name in ("weather", "clock")
]
CALL = '{"name": "weather", "arguments": {"day": "heute"}}'
OTHER = '{"name": "clock", "arguments": {}}'


def told(
    pieces: list[str], dialect: Dialect | None, prompt: str | None = "", *, one_call: bool = False
) -> Said:
    reply = ReplyText(prompt, dialect, TOOLS if dialect else [], one_call=one_call)
    parts = [*(reply.push(piece) for piece in pieces), reply.finish()]
    return Said(
        "".join(part.content for part in parts),
        "".join(part.thinking for part in parts),
        tuple(call for part in parts for call in part.calls),
    )


def cut(text: str, at: list[int]) -> list[str]:
    ends = sorted({min(one, len(text)) for one in at} | {0, len(text)})
    return [text[start:stop] for start, stop in pairwise(ends)]


@given(at=st.lists(st.integers(0, 250), max_size=12))
def test_calls_between_marks(at: list[int]) -> None:
    text = (
        f"<think>hm</think>Let me look.\n<tool_call>\n{CALL}\n</tool_call>\n"
        f"<tool_call>{OTHER}</tool_call>"
    )
    found = told(cut(text, at), HERMES)
    assert found.content.strip() == "Let me look."
    assert found.thinking == "hm"
    assert [call.name for call in found.calls] == ["weather", "clock"]
    assert json.loads(found.calls[0].arguments) == {"day": "heute"}
    assert len({call.id for call in found.calls}) == 2


def test_one_call_is_told_where_no_more_are_wanted() -> None:
    text = f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>"
    assert [call.name for call in told([text], HERMES).calls] == ["weather", "clock"]
    found = told([text], HERMES, one_call=True)
    assert [call.name for call in found.calls] == ["weather"]
    assert found.content == ""


@given(at=st.lists(st.integers(0, 100), max_size=8))
def test_a_call_that_is_the_whole_reply(at: list[int]) -> None:
    text = '{"name": "weather", "parameters": {"day": "x"}}'
    found = told(cut(text, at), LLAMA)
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [
        ("weather", {"day": "x"})
    ]
    assert found.content == ""


@pytest.mark.parametrize(
    "text",
    ["1 < 2 <tool", "<tool_call>{broken</tool_call>", '<tool_call>{"name": "rm"}</tool_call>',
     "no call at all", "<tool_call>[1]</tool_call>", ""],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str) -> None:
    for pieces in ([text], list(text)):
        assert told(pieces, HERMES) == Said(text, "", ())


@pytest.mark.parametrize("text", ['{"a": 1}', "see {x}", '{"name": "rm", "parameters": {}}'])
def test_other_json_stays_text(text: str) -> None:
    for pieces in ([text], list(text)):
        assert told(pieces, LLAMA) == Said(text, "", ())


@given(text=st.text(st.sampled_from("<tol_ca>{}/ x"), max_size=40), at=st.lists(st.integers(0, 40)))
def test_nothing_is_lost(text: str, at: list[int]) -> None:
    assert told(cut(text, at), HERMES).content == text
    assert told(cut(text, at), LLAMA).content == text


def test_a_template_may_open_the_thinking() -> None:
    found = told(["reasons</think>", "\n\nanswer"], None, prompt="<|assistant|><think>\n")
    assert (found.thinking, found.content) == ("reasons", "answer")


def test_a_reply_that_follows_a_grammar_has_no_thinking() -> None:
    text = '{"tags": ["<think>", "</think>"]}'
    for pieces in ([text], list(text)):
        assert told(pieces, None, prompt=None) == Said(text)
    assert told([f"<tool_call>\n{CALL}\n</tool_call>"], HERMES, prompt=None).calls


def test_the_page_ships_with_the_package() -> None:
    import specexec_cli.serve

    folder = Path(specexec_cli.serve.__file__).parent / "page"
    names = {path.name for path in folder.iterdir()}
    assert {"index.html", "style.css", "app.js"} <= names
