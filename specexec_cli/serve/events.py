"""A reply as typed events: each block of it, thinking, text or a call, is opened, grown and closed.

OpenAI's Responses and Anthropic's Messages are both of this kind.
"""

from __future__ import annotations

import json
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request

from specexec_cli.engine.text import Running
from specexec_cli.serve.answer import SILENCE_S, Answer
from specexec_cli.serve.api_errors import GONE, ApiError
from specexec_cli.serve.chat_completions import Asked
from specexec_cli.serve.follow import Change, follow
from specexec_cli.serve.reply import Said
from specexec_cli.serve.service import Service
from specexec_cli.serve.tools import Call

Event = dict[str, Any]  # its field `type` names its kind


def sent(event: Event) -> bytes:
    """The bytes of one event of a stream."""
    told = json.dumps(event, ensure_ascii=False).encode("utf-8", "replace")
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), told)


@dataclass(slots=True)
class Block:
    """A part of a reply, of one kind."""

    kind: Literal["thinking", "text", "call"]
    text: str = ""  # of a call: its arguments, in JSON
    call: Call | None = None
    own_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class EventAnswer(Answer):
    """The response of a protocol of typed events, to a request for one text.

    Attributes:
        blocks: the reply so far.
        thinking_tokens: tokens of its thinking.
    """

    def __init__(
        self, service: Service, request: Request, asked: Asked, stream: bool | None
    ) -> None:
        super().__init__(service, request, asked.texts, stream)
        self.blocks: list[Block] = []
        self.thinking_tokens = 0
        self._reply = asked.splitter(0)
        self._open: Block | None = None

    @abstractmethod
    def begun(self) -> Iterator[Event]:
        """The events before there is any text."""

    @abstractmethod
    def opened(self, block: Block) -> Iterator[Event]:
        """The events that begin a block, which is the last of `blocks`."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> Iterator[Event]:
        """The events that tell new text of a block."""

    @abstractmethod
    def closed(self, block: Block) -> Iterator[Event]:
        """The events that end a block."""

    @abstractmethod
    def ended(self) -> Iterator[Event]:
        """The events behind the last block."""

    @abstractmethod
    def failed(self, error: ApiError) -> Event:
        """The event that ends a stream whose text has failed."""

    @abstractmethod
    def waiting(self) -> bytes:
        """What is sent where nothing has come for SILENCE_S."""

    @property
    def text(self) -> Running:
        """The one text of the request."""
        return self._texts[0]

    def _take(self, change: Change) -> list[Event]:
        return list(self._events(change))

    def _events(self, change: Change) -> Iterator[Event]:
        said = Said()
        for piece in (piece for step in change.steps for piece in step.pieces):
            part = self._reply.push(piece)
            self.thinking_tokens += bool(part.thinking)
            said += part
        if change.ended:
            said += self._reply.finish()
        yield from self._said(said)
        if change.ended:
            if not self.blocks and self.text.finish is not None:  # else it failed
                yield from self._begin(Block("text"))
            yield from self._end()

    def _said(self, said: Said) -> Iterator[Event]:
        if said.thinking:
            yield from self._written("thinking", said.thinking)
        if said.content:
            yield from self._written("text", said.content)
        for call in said.calls:
            yield from self._begin(Block("call", call=call))
            yield from self._grow(call.arguments)

    def _written(self, kind: Literal["thinking", "text"], text: str) -> Iterator[Event]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind))
        yield from self._grow(text)

    def _begin(self, block: Block) -> Iterator[Event]:
        yield from self._end()
        self.blocks.append(block)
        self._open = block
        yield from self.opened(block)

    def _grow(self, text: str) -> Iterator[Event]:
        assert self._open is not None
        self._open.text += text
        yield from self.grown(self._open, text)

    def _end(self) -> Iterator[Event]:
        block, self._open = self._open, None
        if block is not None:
            yield from self.closed(block)

    async def _stream(self) -> AsyncIterator[bytes]:
        for event in self.begun():
            yield sent(event)
        async for change in follow(self._request, self._texts, SILENCE_S):
            if change is None:
                yield self.waiting()
                continue
            for event in self._take(change):
                yield sent(event)
        try:
            self._check_ends()
        except ApiError as error:
            if error.status != GONE:
                yield sent(self.failed(error))
        else:
            for event in self.ended():
                yield sent(event)
