"""No request body makes the server answer with an error of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from serving import Served, served, speaking
from tool_templates import TEMPLATES, WEATHER

from specexec_cli.session import Session

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
# right, nearly right, and anything
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"])},
    optional={
        "content": st.text(max_size=20)
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}))
        | JSON,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {"id": st.text(max_size=3), "type": st.just("function"),
                 "function": st.fixed_dictionaries(
                     {"name": st.text(max_size=4), "arguments": st.text(max_size=6)})}
            ),
            max_size=2,
        ),
        "name": st.text(max_size=4),
    },
)  # fmt: skip
SCHEMA = st.fixed_dictionaries(
    {"type": st.sampled_from(["object", "array", "string", "integer", "frob"])},
    optional={"properties": JSON, "items": JSON, "pattern": st.text(max_size=6), "$ref": JSON,
              "enum": st.lists(JSON, max_size=3), "maxLength": st.integers(-1, 9)},
)  # fmt: skip
FORMAT = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema", "yaml"])},
    optional={"json_schema": st.fixed_dictionaries({"name": JSON, "schema": SCHEMA | JSON}) | JSON},
)
NUMBER = st.sampled_from([0, 1, 0.5, -1, 2, 1e300, 2**70, "1", None, True]) | st.floats()
COMMON = {
    "model": st.sampled_from(["demo", None, "x", 3, "../demo"]),
    "stream": st.booleans() | JSON,
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}) | JSON,
    "n": st.sampled_from([1, 2, 0, 17, None, "1"]),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3) | JSON,
    "temperature": NUMBER, "top_p": NUMBER, "top_k": NUMBER, "min_p": NUMBER,
    "repetition_penalty": NUMBER, "frequency_penalty": NUMBER, "seed": NUMBER,
    "logit_bias": JSON, "user": JSON, "response_format": FORMAT | JSON, "unknown": JSON,
}  # fmt: skip
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3) | JSON},
    optional={
        **COMMON, "logprobs": st.booleans() | JSON, "top_logprobs": NUMBER,
        "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": JSON})),
        "tool_choice": st.sampled_from(["none", "auto", "required"]) | JSON,
    },
)  # fmt: skip
COMPLETION = st.fixed_dictionaries(
    {"prompt": st.text(max_size=20) | st.lists(st.integers(-1, 5000), max_size=4) | JSON},
    optional={**COMMON, "logprobs": NUMBER, "echo": st.booleans(), "best_of": NUMBER},
)
# the other protocols: items and blocks, right, nearly right, and anything
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "text", "input_image", "thinking"])},
    optional={"text": st.text(max_size=5) | JSON, "cache_control": JSON},
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning",
                                 "item_reference"]) | JSON,
        "role": st.sampled_from(["user", "assistant", "developer", "tool"]),
        "content": st.text(max_size=9) | st.lists(PART, max_size=2) | JSON,
        "call_id": st.text(max_size=3), "name": st.text(max_size=3), "output": st.text() | JSON,
        "arguments": st.text(max_size=3),
    },
)  # fmt: skip
RESPONSE = st.fixed_dictionaries(
    {"input": st.text(max_size=20) | st.lists(ITEM, max_size=3) | JSON},
    optional={
        **COMMON, "instructions": st.text() | JSON, "previous_response_id": st.text() | JSON,
        "reasoning": st.fixed_dictionaries({"effort": st.sampled_from(["low", "x"])}) | JSON,
        "text": st.fixed_dictionaries({"format": FORMAT}) | JSON, "store": st.booleans(),
        "tool_choice": st.sampled_from(["none", "auto", "required"]) | JSON, "truncation": JSON,
    },
)  # fmt: skip
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])},
    optional={"text": st.text(max_size=5), "id": JSON, "tool_use_id": st.text(max_size=3),
              "name": st.text(max_size=3), "input": st.dictionaries(st.text(max_size=3), JSON),
              "content": st.text() | st.lists(PART, max_size=2), "thinking": JSON},
)  # fmt: skip
MESSAGE_BODY = st.fixed_dictionaries(
    {"messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]),
                               "content": st.text(max_size=9) | st.lists(BLOCK, max_size=3)}),
        max_size=3) | JSON},
    optional={
        **COMMON, "system": st.text() | st.lists(PART, max_size=2) | JSON,
        "stop_sequences": st.lists(st.text(max_size=3), max_size=3) | JSON, "thinking": JSON,
        "output_config": st.fixed_dictionaries({"effort": st.sampled_from(["max", "x"])}) | JSON,
        "tool_choice": st.fixed_dictionaries(
            {"type": st.sampled_from(["auto", "any", "tool", "none"])}) | JSON,
    },
)  # fmt: skip
# tools of a model that has a form for them: most are right, so that what is behind them is reached
NAME = st.sampled_from(["weather", "clock", "a.b-c"])
TOOLS = st.fixed_dictionaries(
    {"tools": st.lists(
        st.fixed_dictionaries(
            {"type": st.just("function"),
             "function": st.fixed_dictionaries(
                 {"name": NAME},
                 optional={"parameters": SCHEMA | st.just(WEATHER["function"]["parameters"]) | JSON,
                           "description": st.text(max_size=5), "strict": st.booleans()})}),
        min_size=1, max_size=3)},
    optional={
        "tool_choice": st.sampled_from(["none", "auto", "required"])
        | st.fixed_dictionaries({"type": st.just("function"),
                                 "function": st.fixed_dictionaries({"name": NAME})}),
        "parallel_tool_calls": st.booleans(), "stream": st.booleans(), "messages": st.lists(
            MESSAGE, min_size=1, max_size=3),
    },
)  # fmt: skip
# One field of a good body is enough to spoil: the rest is left as it is.
GOOD: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "completions": {"prompt": "def f"},
    "responses": {"input": "hello"},
    "messages": {"messages": [{"role": "user", "content": "hello"}]},
}
KINDS = {
    "chat/completions": CHAT, "completions": COMPLETION, "responses": RESPONSE,
    "messages": MESSAGE_BODY,
}  # fmt: skip
LIMITS = {"responses": "max_output_tokens"}  # names of the field that limits a text's tokens


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with (
        Session.open(model="demo", method="autoregressive", offline=True) as session,
        served(session) as found,
    ):
        yield found


def answer(server: Served, path: str, body: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}/v1/{path}", content=body, headers=headers, timeout=60)


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        body = response.json()
        anthropic = body.get("type") == "error"
        assert set(body["error"]) == {"message", "type", *(() if anthropic else ("param", "code"))}
        assert body["error"]["message"]
        assert body["error"]["type"] not in ("server_error", "api_error")
    elif response.headers["content-type"].startswith("text/event-stream"):
        last = response.text.rpartition("data: ")[2]
        assert last == "[DONE]\n\n" or json.loads(last)["type"] in ENDS
        assert '"server_error"' not in response.text
    else:
        body = response.json()
        reasons = [choice["finish_reason"] for choice in body.get("choices", ())]
        assert all(reasons or [body.get("stop_reason") or body.get("status") in STATES])


ENDS = ("message_stop", "response.completed", "response.incomplete")
STATES = ("completed", "incomplete")
FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FEW
@given(path=st.sampled_from(sorted(GOOD)), data=st.data())
def test_one_wrong_field(server: Served, path: str, data: st.DataObject) -> None:
    whole = data.draw(KINDS[path])
    name = data.draw(st.sampled_from(sorted(whole)))
    body = {**GOOD[path], LIMITS.get(path, "max_tokens"): 2, name: whole[name]}
    check(answer(server, path, json.dumps(body).encode()))


@FEW
@given(path=st.sampled_from(sorted(GOOD)), data=st.data())
def test_many_wrong_fields(server: Served, path: str, data: st.DataObject) -> None:
    body = data.draw(KINDS[path])
    check(answer(server, path, json.dumps({LIMITS.get(path, "max_tokens"): 2, **body}).encode()))


@pytest.mark.parametrize("family", ["glm-4.5", "hermes", "mistral-small", "qwen-coder"])
def test_tools_that_the_model_can_be_told_of(server: Served, family: str) -> None:
    with speaking(server, TEMPLATES[family]):
        accepted = 0

        @settings(FEW, max_examples=25)
        @given(tools=TOOLS)
        def tried(tools: dict[str, Any]) -> None:
            nonlocal accepted
            body = {**GOOD["chat/completions"], "max_tokens": 3, **tools}
            response = answer(server, "chat/completions", json.dumps(body).encode())
            check(response)
            accepted += response.status_code == 200

        tried()
        assert accepted, "no body got behind the check of tools"


@FEW
@given(path=st.sampled_from(sorted(GOOD)), body=st.binary(max_size=40) | JSON.map(json.dumps))
@example(path="completions", body=b'{"prompt": "\\ud800"}')
@example(path="completions", body=b'{"user": "\\ud800", "prompt": "x", "max_tokens": 1}')
@example(path="completions", body=b'{"prompt": NaN}')
@example(path="completions", body=b'{"seed": ' + b"9" * 5000 + b', "prompt": "x"}')
@example(path="completions", body=b"[" * 100_000)
@example(path="completions", body=b'{"prompt": [[]]}')
@example(path="completions", body=b'{"prompt": []}')
@example(path="completions", body=b'{"prompt": ""}')
@example(path="chat/completions", body=b"\xff\xfe")
def test_what_is_hardly_json(server: Served, path: str, body: str | bytes) -> None:
    check(answer(server, path, body if isinstance(body, bytes) else body.encode()))
