"""The errors that a server gives for request bodies with mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from specexec_cli.serve import reading
from specexec_cli.serve.api_errors import ApiError, without_folders
from specexec_cli.serve.bodies import ChatBody, CompletionBody, checked
from specexec_cli.serve.reading import Window, read_body

WINDOW = Window(context_tokens=64, token_characters=16)
MESSAGES = [{"role": "user", "content": "hello"}]


def parsed(kind: Any, raw: bytes, window: Window) -> Any:
    """A body as the server reads it."""
    return checked(kind, read_body(raw), window)


def refused(**fields: Any) -> str:
    body = {"model": "demo", "messages": MESSAGES, **fields}
    with pytest.raises(ApiError) as caught:
        parsed(ChatBody, json.dumps(body).encode(), WINDOW)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stop": ["x"] * 17}, "stop: it is too long, give 16 or fewer"),
        ({"stop": ""}, "stop: it is too short, give 1 or more characters"),
        ({"stop": 3}, "stop: 3 is not taken, give a text"),
        ({"max_tokens": 0}, "max_tokens: 0 is too small, give 1 or more"),
        ({"max_tokens": "x" * 99}, f'max_tokens: "{"x" * 39}... is not taken, give a whole number'),
        ({"frequency_penalty": 0.5}, "frequency_penalty: 0.5 is too large, give 0 or less"),
        ({"temperature": "1"}, 'temperature: "1" is not taken, give a number'),
        ({"stream": {}}, "stream: an object is not taken, give true or false"),
        ({"messages": {}}, "messages: an object is not taken, give a list"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: it is missing"),
        ({"messages": [{"role": "x"}]}, "messages.0.role: \"x\" is not known here, give 'system',"),
        ({"suffix": "x"}, "'suffix' is not known here"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            'tools.0.function.name: "a b" is not taken, give what fits',
        ),
        ({"temprature": 1}, "'temprature' is not known here"),
    ],
)
def test_the_mistake_that_was_made_is_told(fields: dict[str, Any], told: str) -> None:
    assert refused(**fields).startswith(told)


def test_a_picture_is_refused_where_it_stands() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    told = refused(messages=[{"role": "user", "content": [picture]}])
    assert told.startswith("messages.0.content.0"), told


def turned_away(kind: Any, raw: bytes, window: Window = WINDOW) -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        parsed(kind, raw, window)
    error = caught.value.body["error"]
    assert len(error["message"]) < 700
    assert len(error["param"] or "") < 700
    return caught.value.status, error["message"]


LARGE = Window(context_tokens=1 << 20, token_characters=256)
EACH = 200_000


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": [' + b"[]," * EACH + b"1]}",
        b'{"prompt": [' + b'"",' * EACH + b"1]}",
        b'{"prompt": [' + b"1e9," * EACH + b"1]}",
        b'{"prompt": [' + b"1.5," * EACH + b"1]}",
        b'{"prompt": [' + b"1," * (8 * EACH) + b"1]}",
        b'{"prompt": [' + b"[1,2]," * (EACH // 2) + b'"x",' * EACH + b"1]}",
        b"{" + b",".join(b'"k%d":0' % number for number in range(EACH)) + b"}",
    ],
)
def test_bodies_of_too_many_parts_are_not_read(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "parse_json", pytest.fail)
    for kind in (ChatBody, CompletionBody):
        status, told = turned_away(kind, raw, LARGE)
        assert (status, "no request needs as many" in told) == (413, True)


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        (CompletionBody, {"prompt": "a" * 70_000}, "the prompt has 70000 characters"),
        (CompletionBody, {"prompt": ["a", "a" * 70_000]}, "the prompt has 70000 characters"),
        (ChatBody, {"messages": MESSAGES * 65}, "65 messages, the context window holds 64"),
        (ChatBody, {"messages": [{"role": "user", "content": "a" * 40_000}] * 2},
         "the conversation has 80008 characters"),
        (ChatBody, {"messages": MESSAGES, "tools": ["a" * 70_000]}, "the conversation has 70009"),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_before_a_model_is_made(
    kind: Any, fields: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "model_validate", pytest.fail)
    status, message = turned_away(kind, json.dumps(fields).encode())
    assert (status, message.startswith(told)) == (400, True)
    assert "context window holds 64 tokens of at most 16 characters: shorten" in message


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        (
            ChatBody,
            {"messages": MESSAGES, **{f"k{n}": 1 for n in range(300)}},
            "at most 200 fields",
        ),
        (ChatBody, {"messages": [{f"k{n}": 1 for n in range(300)}]}, "at most 200 fields"),
        (ChatBody, {"messages": MESSAGES, "a" * 9000: 1}, "is not known here"),
        (ChatBody, {"messages": [{**MESSAGES[0], "a" * 9000: 1}]}, "'messages.0.aaa"),
    ],
)
def test_messages_about_many_or_long_fields_are_short(
    kind: Any, fields: dict[str, Any], told: str
) -> None:
    status, message = turned_away(kind, json.dumps(fields).encode())
    assert (status, told in message) == (400, True)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": [1.5] * 9000}),
        (CompletionBody, {"prompt": [[1.5] * 9000]}),
        (CompletionBody, {"prompt": [1] * 9000 + ["x"] * 9000}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 9000}]}),
        (ChatBody, {"messages": [{"role": "user", "content": "", "tool_calls": [1] * 9000}]}),
        (ChatBody, {"messages": [{}] * 64}),
        (ChatBody, {"messages": MESSAGES, "modalities": [1] * 9000}),
    ],
)
def test_mistakes_are_not_all_noted(kind: Any, fields: dict[str, Any]) -> None:
    """A list of thousands of mistakes would take seconds to write."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    assert caught.value.error_count() < 10


@pytest.mark.parametrize("word", ["NaN", "-Infinity", "Infinity"])
def test_words_that_json_does_not_have(word: str) -> None:
    for raw in (f'{{"prompt": {word}}}', f'{{"user": [1, {word}]}}', word):
        assert turned_away(CompletionBody, raw.encode())[1].startswith("the body is not JSON")
    assert parsed(CompletionBody, b'{"prompt": "NaN, Infinity"}', WINDOW).prompt


def test_what_a_request_may_hold_comes_through() -> None:
    tokens = [[7, 12_345, 151_000]] * 16
    body = json.dumps({"prompt": tokens, "temperature": 1e-3, "metadata": {"a": [0.5, None, True]}})
    assert parsed(CompletionBody, body.encode(), WINDOW).prompt == tokens
    many = [{"role": "user", "content": [{"type": "text", "text": '"\\{[,' * 9}] * 9}] * 900
    found = parsed(ChatBody, json.dumps({"messages": many}).encode("utf-16"), LARGE)
    assert len(found.messages) == 900
    assert found.messages[0].text == '"\\{[,' * 81


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("reading /a b/it's/c: failed at byte 3: Input/output error",
         "reading c: failed at byte 3: Input/output error"),
        ("/a:b/c/x.gguf was changed while it was read", "x.gguf was changed while it was read"),
        ("cannot open '~/models/x': no such file or directory (~/y/z)",
         "cannot open 'x': no such file or directory (z)"),
        ("12 tokens/s, see https://a.b/c", "12 tokens/s, see https://a.b/c"),
    ],
)  # fmt: skip
def test_folders_are_left_out_of_answers(text: str, told: str) -> None:
    assert without_folders(text) == told
