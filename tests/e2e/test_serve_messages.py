"""Anthropic's Messages: the same texts as chat completions, in content blocks and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Served, served, speaking
from tool_templates import TEMPLATES, WEATHER

from specexec_cli.session import Session

KEY = "secret"
HELLO = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 12}
TOOL = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": WEATHER["function"]["parameters"],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with (
        Session.open(model="demo", offline=True) as session,
        served(session, api_key=KEY) as found,
    ):
        yield found


def post(server: Served, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    headers = headers or {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    return httpx.post(f"{server.url}/v1/{path}", json=body, headers=headers, timeout=60)


def message(server: Served, **more: Any) -> Any:
    found = post(server, "messages", {**ASKED, **more})
    assert found.status_code == 200, found.text
    return found.json()


def chat(server: Served, messages: Any, **more: Any) -> Any:
    body = {"model": "demo", "messages": messages, "max_tokens": 12, **more}
    return post(server, "chat/completions", body).json()


def events(server: Served, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream; each is named in a line of its own, as in its data."""
    found = post(server, "messages?beta=true", {**ASKED, "stream": True, **more})
    assert found.headers["content-type"].startswith("text/event-stream")
    told = []
    for each in found.text.strip().split("\n\n"):
        name, data = each.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def test_a_message_is_what_chat_completions_say(server: Served) -> None:
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    sampling = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 4}
    found = message(server, system=system, metadata={"user_id": "x"}, **sampling)
    same = chat(server, [{"role": "system", "content": "Be kind."}, *HELLO], **sampling)
    assert found["content"] == [{"type": "text", "text": same["choices"][0]["message"]["content"]}]
    assert found["content"][0]["text"]
    prompt = found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"]
    assert prompt == same["usage"]["prompt_tokens"]
    assert found["usage"]["output_tokens"] == same["usage"]["completion_tokens"]
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "demo")
    assert found["stop_reason"] == (
        "max_tokens" if found["usage"]["output_tokens"] == 12 else "end_turn"
    )
    counted = post(
        server, "messages/count_tokens", {"model": "demo", "messages": HELLO, "system": system}
    )
    assert counted.json() == {"input_tokens": prompt}
    empty = [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]
    for path in ("messages", "messages/count_tokens"):
        refused = post(server, path, {"model": "demo", "messages": empty, "max_tokens": 4})
        assert refused.status_code == 400, refused.text


def test_the_events_of_a_stream(server: Served) -> None:
    whole, told = message(server), events(server)
    kinds = [event["type"] for event in told]
    deltas = [event for event in told if event["type"] == "content_block_delta"]
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * len(deltas),
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    text = "".join(event["delta"]["text"] for event in deltas)
    assert [{"type": "text", "text": text}] == whole["content"]
    assert told[0]["message"] == {
        **whole, "id": told[0]["message"]["id"], "content": [], "stop_reason": None,
        "usage": {**told[0]["message"]["usage"], "output_tokens": 0},
    }  # fmt: skip
    assert told[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert told[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize("several", [False, True])
def test_the_stop_sequence_that_ended_a_message_is_told(server: Served, several: bool) -> None:
    text = message(server)["content"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    found = message(server, stop_sequences=["zzzz", stop] if several else [stop])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"][0]["text"] == text[: text.index(stop)]


def test_thinking_is_a_block_of_its_own(server: Served) -> None:
    with speaking(server, "{{ messages[0].content }}<think>"):
        found = message(server)
        (block,) = found["content"]
        assert block["type"] == "thinking"
        told = events(server)
        parts = [one["delta"] for one in told if one["type"] == "content_block_delta"]
        assert {part["type"] for part in parts} == {"thinking_delta"}
        assert "".join(part["thinking"] for part in parts) == block["thinking"]
        turns = [*HELLO, {"role": "assistant", "content": found["content"]}, *HELLO]
        assert message(server, messages=turns)["content"]
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        quiet = message(server, output_config={"format": {"type": "json_schema", "schema": schema}})
        assert quiet["content"][0]["text"].startswith("{")


def test_functions_are_called(server: Served) -> None:
    asked = {"max_tokens": 100, "tools": [TOOL]}
    refused = post(server, "messages", {**ASKED, **asked})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "cannot be told of tools" in refused.json()["error"]["message"]
    with speaking(server, TEMPLATES["hermes"]):
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            found = message(server, **asked, tool_choice=choice)
            assert found["stop_reason"] == "tool_use"
            (call,) = found["content"]
            assert (call["type"], call["name"]) == ("tool_use", "weather")
            assert call["input"]["day"] in ("today", "tomorrow")
        told = events(server, **asked, tool_choice={"type": "any"})
        start, *deltas = told[1:-3]
        assert start["content_block"] == {
            "type": "tool_use", "id": start["content_block"]["id"], "name": "weather", "input": {},
        }  # fmt: skip
        parts = "".join(one["delta"]["partial_json"] for one in deltas)
        assert json.loads(parts)["day"] in ("today", "tomorrow")
        assert told[-2]["delta"]["stop_reason"] == "tool_use"
        # the call goes back with its result, and so it is for chat completions
        results = [
            {"type": "tool_result", "tool_use_id": call["id"],
             "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "thanks"},
        ]  # fmt: skip
        turns = [
            *HELLO, {"role": "assistant", "content": found["content"]},
            {"role": "user", "content": results},
        ]  # fmt: skip
        counted = post(server, "messages/count_tokens", {"messages": turns, "tools": [TOOL]})
        function = {"name": "weather", "arguments": json.dumps(call["input"])}
        same = chat(
            server,
            [
                *HELLO,
                {"role": "assistant", "content": "",
                 "tool_calls": [{"id": call["id"], "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
                {"role": "user", "content": "thanks"},
            ],
            tools=[{"type": "function", "function": {
                "name": "weather", "description": TOOL["description"],
                "parameters": TOOL["input_schema"]}}],
        )  # fmt: skip
        assert counted.json()["input_tokens"] == same["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("more", "status", "kind", "told"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "x"}, 404, "not_found_error", "no model 'x' is open"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, 400,
         "invalid_request_error", "end with a user's message"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
         "invalid_request_error", "messages.0.content.0"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ({"mirostat": 2}, 400, "invalid_request_error", "'mirostat' is not known"),
        ({"system": "a " * 5000}, 400, "invalid_request_error", "context window"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_form(
    server: Served, more: dict[str, Any], status: int, kind: str, told: str
) -> None:
    found = post(server, "messages", {**ASKED, **more})
    body = found.json()
    assert (found.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert told in body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("messages", {"x-api-key": KEY}, 200),
        ("messages", {"authorization": f"Bearer {KEY}"}, 200),
        ("messages", {"authorization": "Bearer x", "x-api-key": KEY}, 200),
        ("messages", {"x-api-key": f"{KEY}x"}, 401),
        ("messages", {"accept": "*/*"}, 401),
        ("messages/batches", {"x-api-key": KEY}, 404),
    ],
)
def test_keys(server: Served, path: str, headers: dict[str, str], status: int) -> None:
    found = post(server, path, ASKED, **headers)
    assert found.status_code == status
    if status == 401:
        assert found.json()["error"]["type"] == "authentication_error"
    if status == 404:
        assert found.json()["error"]["type"] == "not_found_error"
