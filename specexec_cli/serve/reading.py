"""Receives the bodies of requests, and checks their limits before they are parsed.

Parsing JSON and building pydantic's models holds Python's global lock, and with it the event loop.
So the contents of a body are counted first, in short steps: a body that a stranger has made to be
slow must not keep other requests waiting.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from starlette.requests import Request

from specexec_cli.guarded import parse_json
from specexec_cli.serve.api_errors import ApiError

MOST_BODY_BYTES = 8 << 20
SMALL_BYTES = 64 << 10  # size of bodies that take little time; larger ones have their own thread
_MOST_HELD_BYTES = 64 << 20  # most bytes of all larger bodies that are not yet prompts
_MOST_PARTS = 100_000  # most texts, lists, objects and fractions in a body
_MOST_VALUES = 1_000_000  # most values in a body, whole numbers included: 8 MB of tokens
_MOST_FIELDS = 200  # most fields of a body or of a message
_LISTS = ("messages", "input")  # fields that may hold a conversation's messages
_CONVERSATION = (*_LISTS, "tools", "system", "instructions")  # fields that the prompt is made of
_OPENS = re.compile(r'["\[{]')
_TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The largest prompt that can fit, whatever its text."""

    context_tokens: int
    token_characters: int  # characters of the longest token

    @property
    def characters(self) -> int:
        """The most characters that can fit, if every token were as long as the longest."""
        return self.context_tokens * self.token_characters


class Bodies:
    """Receives bodies, and bounds the memory that large ones take together."""

    def __init__(self) -> None:
        self._held = 0  # bytes of all large bodies
        self._large = asyncio.Semaphore(1)  # large bodies are parsed one after another

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Receives a request's body, which counts as held until the context is left.

        Raises:
            ApiError: the body is larger than a request may be, or other large bodies are held.
        """
        read, counted = bytearray(), 0
        try:
            async for piece in request.stream():
                read += piece
                if len(read) > MOST_BODY_BYTES:
                    raise ApiError(
                        413, f"the body is larger than {MOST_BODY_BYTES >> 20} MB", code="too_large"
                    )
                if len(read) > SMALL_BYTES:
                    self._held += len(read) - counted
                    counted = len(read)
                    if self._held > _MOST_HELD_BYTES:
                        raise ApiError(
                            429, "other large requests are being read: try again later",
                            code="queue_full",
                        )  # fmt: skip
            yield bytes(read)
        finally:
            self._held -= counted

    async def parsed(self, raw: bytes) -> Any:
        """Parses a body; a large one in a thread, so that small ones do not wait.

        Raises:
            ApiError: see read_body.
        """
        if len(raw) <= SMALL_BYTES:
            return read_body(raw)
        async with self._large:
            return await asyncio.to_thread(read_body, raw)


def read_body(raw: bytes) -> Any:
    """Checks and parses a body.

    Raises:
        ApiError: the body is not JSON, or holds more than any request needs.
    """
    try:
        text = raw.decode(json.detect_encoding(raw))
        _count(text)
        found = parse_json(text)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}") from error
    if isinstance(found, dict):
        _check_fields(found)
    return found


def _count(text: str) -> None:
    """Counts the parts and values of a body.

    Raises:
        ApiError: the body holds too many.
        ValueError: the body contains NaN or Infinity, which are not JSON.
    """
    parts = values = last = 0
    while last < len(text) and parts <= _MOST_PARTS:
        found = _OPENS.search(text, last)
        fractions, commas = _between(text[last : found.start() if found else len(text)])
        parts, values = parts + 1 + fractions, values + commas
        if found is None:
            break
        whole = _TEXT.match(text, found.start()) or found
        last = whole.end()
    if parts > _MOST_PARTS or values > _MOST_VALUES:
        raise ApiError(
            413,
            f"the body holds more than {_MOST_PARTS} texts, lists and objects, or more than "
            f"{_MOST_VALUES} values: no request needs as many",
            code="too_large",
        )


def _between(text: str) -> tuple[int, int]:
    """Counts signs of fractions (points, letters e) and commas between texts, lists and objects.

    Raises:
        ValueError: the text contains NaN or Infinity.
    """
    if len(text) < 3:  # nearly always: only a comma or a colon between two parts
        return 0, text.count(",")
    if "N" in text or "I" in text:
        raise ValueError("NaN and Infinity are no numbers")
    return text.count(".") + text.count("e") + text.count("E"), text.count(",")


def _check_fields(found: Mapping[str, Any]) -> None:
    lists = (value for value in map(found.get, _LISTS) if isinstance(value, list))
    for item in chain([found], *lists):
        if isinstance(item, dict) and len(item) > _MOST_FIELDS:
            raise ApiError(
                400, f"a request and its messages have at most {_MOST_FIELDS} fields each, this "
                f"one has {len(item)}",
            )  # fmt: skip


def check_prompt(found: Any, window: Window) -> None:
    """Checks whether a body's prompt can fit the context window, whatever its text.

    Raises:
        ApiError: it cannot.
    """
    if not isinstance(found, dict):
        return
    prompt = found.get("prompt")
    for one in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(one, str):
            _check_characters(len(one), "prompt", window)
    for name in _LISTS:
        count = len(found[name]) if isinstance(found.get(name), list) else 0
        if count > window.context_tokens:
            raise _too_long(f"{count} messages", window)
    _check_characters(_characters([*map(found.get, _CONVERSATION)]), "conversation", window)


def _check_characters(count: int, what: str, window: Window) -> None:
    if count > max(window.characters, SMALL_BYTES):  # shorter texts' tokens are counted soon
        raise _too_long(f"the {what} has {count} characters", window)


def _too_long(what: str, window: Window) -> ApiError:
    return ApiError(
        400,
        f"{what}, the context window holds {window.context_tokens} tokens of at most "
        f"{window.token_characters} characters: shorten the prompt",
        code="context_length_exceeded",
    )


def _characters(values: Sequence[Any]) -> int:
    """Characters of all texts in `values`, at any depth."""
    count, open_ = 0, list(values)
    while open_:
        value = open_.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, dict):
            open_ += value.values()
        elif isinstance(value, list):
            open_ += value
    return count
