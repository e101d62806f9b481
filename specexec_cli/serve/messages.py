"""/v1/messages: Anthropic's Messages, as content blocks that are sent whole or in events.

Source: the types of the anthropic client (anthropic/types).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

from specexec_cli.guarded import parse_json
from specexec_cli.serve import answers
from specexec_cli.serve.api_errors import ApiError, anthropic_body
from specexec_cli.serve.chat_completions import Asked
from specexec_cli.serve.events import Block, Event, EventAnswer, sent
from specexec_cli.serve.follow import Change
from specexec_cli.serve.message_bodies import MessageBody
from specexec_cli.serve.service import Service

_DELTA = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
_REASONS = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens"}


class MessageAnswer(EventAnswer):
    """The response of /v1/messages."""

    def __init__(self, service: Service, request: Request, body: MessageBody, asked: Asked) -> None:
        super().__init__(service, request, asked, body.stream)
        self._stops = body.stop_sequences or []
        self._id = f"msg_{uuid.uuid4().hex}"
        self._tokens: list[int] = []  # of the text, to find out by which stop sequence it ended

    def begun(self) -> Iterator[Event]:
        """See EventAnswer."""
        yield {"type": "message_start", "message": self._message([], None, None)}

    def opened(self, block: Block) -> Iterator[Event]:
        """See EventAnswer."""
        yield self._of("content_block_start", content_block=_content(block, opened=True))

    def grown(self, block: Block, text: str) -> Iterator[Event]:
        """See EventAnswer."""
        kind, name = _DELTA[block.kind]
        yield self._of("content_block_delta", delta={"type": kind, name: text})

    def closed(self, block: Block) -> Iterator[Event]:
        """See EventAnswer."""
        yield self._of("content_block_stop")

    def ended(self) -> Iterator[Event]:
        """See EventAnswer."""
        reason, stop = self._reason()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage(ended=True)}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> Event:
        """See EventAnswer."""
        return anthropic_body(error.status, str(error))

    def waiting(self) -> bytes:
        """See EventAnswer."""
        return sent({"type": "ping"})

    def _take(self, change: Change) -> list[Event]:
        self._tokens += [token for step in change.steps for token in step.tokens]
        return super()._take(change)

    def _whole(self) -> dict[str, Any]:
        return self._message([_content(block) for block in self.blocks], *self._reason())

    def _of(self, kind: str, **more: Any) -> Event:
        """An event of the block that is open."""
        return {"type": kind, "index": len(self.blocks) - 1, **more}

    def _reason(self) -> tuple[str | None, str | None]:
        """Why the reply ended, and the stop sequence that ended it."""
        if any(block.call is not None for block in self.blocks):
            return "tool_use", None
        reason, stops = _REASONS.get(self.text.finish or ""), self._stops
        if reason != "stop_sequence" or len(stops) == 1:
            return reason, stops[0] if reason == "stop_sequence" else None
        text = self._spelling().whole(self._tokens)
        found = sorted((text.find(stop), stop) for stop in stops if stop in text)
        return reason, found[0][1] if found else None

    def _usage(self, *, ended: bool) -> dict[str, Any]:
        usage = answers.usage(self._texts, 1)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        told = {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        }  # fmt: skip
        return {**told, "specexec": usage["specexec"]} if ended else told

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._service.model,
            "content": content, "stop_reason": reason, "stop_sequence": stop,
            "usage": self._usage(ended=reason is not None),
        }  # fmt: skip


def _content(block: Block, *, opened: bool = False) -> dict[str, Any]:
    """A block as the protocol has it; without its text while it is only `opened`."""
    if block.call is not None:
        arguments = {} if opened else parse_json(block.text)
        call = block.call
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}
