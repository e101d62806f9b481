"""The stock openai client's Responses: the same texts as chat completions, in items and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest
from serving import Served, served, speaking
from tool_templates import TEMPLATES, WEATHER

from specexec_cli.serve import conversations
from specexec_cli.session import Session

ASKED: dict[str, Any] = {"model": "demo", "input": "hello", "max_output_tokens": 12}
TOOL: Any = {"type": "function", **WEATHER["function"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Session.open(model="demo", offline=True) as session, served(session) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with closing(
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0,
            _strict_response_validation=True,
        )
    ) as it:  # fmt: skip
        yield it


def chat(client: openai.OpenAI, messages: Any, **more: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, max_tokens=12, **more)


def test_a_response_is_what_chat_completions_say(client: openai.OpenAI) -> None:
    found = client.responses.create(
        **ASKED, instructions="Be kind.", temperature=0.9, extra_body={"seed": 5, "min_p": 0.1}
    )
    assert found.usage is not None
    same = chat(
        client,
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}],
        temperature=0.9, seed=5, extra_body={"min_p": 0.1},
    )  # fmt: skip
    assert found.output_text == same.choices[0].message.content
    assert found.output_text
    assert found.usage.input_tokens == same.usage.prompt_tokens
    assert found.usage.output_tokens == same.usage.completion_tokens
    assert found.instructions == "Be kind."
    cut = client.responses.create(**{**ASKED, "max_output_tokens": 1})
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_the_events_of_a_stream(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", *["response.output_text.delta"] * deltas,
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        f"response.{whole.status}",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    item = events[-1].response.output[0]
    assert {getattr(event, "item_id", item.id) for event in events} == {item.id}
    with client.responses.stream(**ASKED) as stream:  # the client's own accumulation
        stream.until_done()
    # and a conversation of items
    turn: Any = [*whole.output, {"role": "user", "content": [{"type": "input_text", "text": "x"}]}]
    asked = [{"role": "user", "content": "hello"}, *turn]
    said = client.responses.create(**{**ASKED, "input": asked})
    same = chat(
        client,
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": whole.output_text},
            {"role": "user", "content": "x"},
        ],
    )
    assert said.output_text == same.choices[0].message.content
    # which may also be asked for by its id
    by_id = client.responses.create(**{**ASKED, "input": turn[1:]}, previous_response_id=whole.id)
    assert by_id.output_text == said.output_text
    assert by_id.previous_response_id == whole.id


def test_conversations_that_are_not_kept(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = client.responses.create(**ASKED, store=False)
    with pytest.raises(openai.NotFoundError, match="Send the whole conversation as input") as told:
        client.responses.create(**ASKED, previous_response_id=gone.id)
    assert told.value.code == "previous_response_not_found"
    old = client.responses.create(**ASKED)
    client.responses.create(**ASKED, previous_response_id=old.id)
    monkeypatch.setattr(conversations, "_MOST", 1)
    new = client.responses.create(**ASKED)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASKED, previous_response_id=old.id)
    assert client.responses.create(**ASKED, previous_response_id=new.id).output_text


def test_thinking_is_an_item_of_its_own(client: openai.OpenAI, server: Served) -> None:
    with speaking(server, "{{ messages[0].content }}<think>"):
        found = client.responses.create(**ASKED)
        assert [item.type for item in found.output] == ["reasoning"]
        assert found.usage is not None
        assert found.usage.output_tokens_details.reasoning_tokens > 0
        kinds = [event.type for event in client.responses.create(**ASKED, stream=True)]
        assert "response.reasoning_text.delta" in kinds
        # and it may come back
        turn: Any = [*found.output, {"role": "user", "content": "x"}]
        assert client.responses.create(**{**ASKED, "input": turn}).output
        quiet = client.responses.create(
            **ASKED, text={"format": {"type": "json_object"}}, reasoning={"effort": "low"}
        )
        assert quiet.output_text.startswith("{")


def test_functions_are_called(client: openai.OpenAI, server: Served) -> None:
    asked = {**ASKED, "max_output_tokens": 100, "tools": [TOOL]}
    with pytest.raises(openai.BadRequestError, match="cannot be told of tools"):
        client.responses.create(**asked)
    with speaking(server, TEMPLATES["hermes"]):
        for choice in ("required", {"type": "function", "name": "weather"}):
            found = client.responses.create(**asked, tool_choice=choice)
            (call,) = found.output
            assert (call.type, call.name) == ("function_call", "weather")
            assert json.loads(call.arguments)["day"] in ("today", "tomorrow")
        events = list(client.responses.create(**asked, tool_choice="required", stream=True))
        (done,) = (one for one in events if one.type == "response.function_call_arguments.done")
        deltas = [
            one.delta for one in events if one.type == "response.function_call_arguments.delta"
        ]
        assert "".join(deltas) == done.arguments
        assert events[-1].type == "response.completed"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        turn = client.responses.create(
            **{**asked, "input": [result]}, previous_response_id=found.id
        )
        items = [{"role": "user", "content": "hello"}, call, result]
        assert client.responses.create(**{**asked, "input": items}).output_text == turn.output_text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"model": "gpt-4"}, "no model 'gpt-4' is open"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"background": True}, "background"),
        ({"extra_body": {"mirostat": 2}}, "'mirostat' is not known here"),
        ({"input": "a " * 5000}, "context window"),
    ],
)
def test_wrong_requests(client: openai.OpenAI, more: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as told:
        client.responses.create(**{**ASKED, **more})
    assert told.value.status_code in (400, 404)
