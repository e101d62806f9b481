"""What a request's body is told that is not right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specexec_cli.serve.api_errors import ApiError
from specexec_cli.serve.bodies import ChatBody, parsed

MESSAGES = [{"role": "user", "content": "hello"}]


def refused(**fields: Any) -> str:
    body = {"model": "demo", "messages": MESSAGES, **fields}
    with pytest.raises(ApiError) as caught:
        parsed(ChatBody, json.dumps(body).encode())
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stop": ["x"] * 17}, "stop: List should have at most 16 items"),
        ({"stop": ""}, "stop: String should have at least 1 character"),
        ({"stop": 3}, "stop: Input should be a valid string"),
        ({"max_tokens": -1}, "max_tokens: Input should be greater than"),
        ({"temprature": 1}, "'temprature' is not known here"),
    ],
)
def test_the_mistake_that_was_made_is_told(fields: dict[str, Any], told: str) -> None:
    assert refused(**fields).startswith(told)


def test_a_picture_is_refused_where_it_stands() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    told = refused(messages=[{"role": "user", "content": [picture]}])
    assert told.startswith("messages.0.content.0"), told
