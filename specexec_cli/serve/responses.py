"""/v1/responses: OpenAI's Responses, as items that are sent whole or in events.

Source: the types of the openai client (openai/types/responses).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

from specexec_cli.serve import answers
from specexec_cli.serve.api_errors import ApiError
from specexec_cli.serve.bodies import ChatBody, ChatMessage, FunctionCall, ToolCall
from specexec_cli.serve.chat_completions import Asked
from specexec_cli.serve.conversations import Conversations
from specexec_cli.serve.events import Block, Event, EventAnswer
from specexec_cli.serve.response_bodies import ResponseBody
from specexec_cli.serve.service import Service

_PREFIX = {"thinking": "rs", "text": "msg", "call": "fc"}  # of the ids of items
_DELTA = {
    "thinking": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class ResponseAnswer(EventAnswer):
    """The response of /v1/responses.

    Args:
        chat: the chat request that the body stands for.
        kept: keeps the conversation, unless the request says otherwise.
    """

    def __init__(
        self,
        service: Service,
        request: Request,
        body: ResponseBody,
        chat: ChatBody,
        asked: Asked,
        kept: Conversations,
    ) -> None:
        super().__init__(service, request, asked, body.stream)
        self._body, self._chat, self._kept = body, chat, kept
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._number = 0  # of the next event

    def begun(self) -> Iterator[Event]:
        """See EventAnswer."""
        for word in ("created", "in_progress"):
            yield self._event(f"response.{word}", response=self._response("in_progress"))

    def opened(self, block: Block) -> Iterator[Event]:
        """See EventAnswer."""
        item = _item(block, "in_progress")
        if block.kind != "call":
            item["content"] = []
        yield self._event("response.output_item.added", output_index=self._index, item=item)
        if block.kind != "call":
            yield self._of(block, "response.content_part.added", part=_part(block))

    def grown(self, block: Block, text: str) -> Iterator[Event]:
        """See EventAnswer."""
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        yield self._of(block, f"{_DELTA[block.kind]}.delta", delta=text, **more)

    def closed(self, block: Block) -> Iterator[Event]:
        """See EventAnswer."""
        told: dict[str, Any] = {"text": block.text}
        if block.call is not None:
            told = {"arguments": block.text, "name": block.call.name}
        elif block.kind == "text":
            told["logprobs"] = []
        yield self._of(block, f"{_DELTA[block.kind]}.done", **told)
        if block.kind != "call":
            yield self._of(block, "response.content_part.done", part=_part(block))
        item = _item(block, self._status)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def ended(self) -> Iterator[Event]:
        """See EventAnswer."""
        yield self._event(f"response.{self._status}", response=self._whole())

    def failed(self, error: ApiError) -> Event:
        """See EventAnswer."""
        told = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response=self._response("failed", error=told))

    def waiting(self) -> bytes:
        """See EventAnswer."""
        return answers.KEEP_ALIVE

    @property
    def _index(self) -> int:
        """The place of the block that is open."""
        return len(self.blocks) - 1

    @property
    def _status(self) -> str:
        return "completed" if self.text.finish in ("eos", "stop") else "incomplete"

    def _event(self, kind: str, **more: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    def _of(self, block: Block, kind: str, **more: Any) -> Event:
        """An event of the block that is open."""
        place = {} if block.kind == "call" else {"content_index": 0}
        return self._event(kind, item_id=_id(block), output_index=self._index, **place, **more)

    def _whole(self) -> dict[str, Any]:
        if self._body.store is not False:
            self._kept.keep(self._id, [*self._said_before(), _message(self.blocks)])
        usage = answers.usage(self._texts, 1)
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.thinking_tokens},
            "total_tokens": usage["total_tokens"],
            "specexec": usage["specexec"],
        }
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return self._response(
            self._status, usage=counts, incomplete_details=cut, completed_at=int(time.time()),
            output=[_item(block, self._status) for block in self.blocks],
        )  # fmt: skip

    def _said_before(self) -> list[ChatMessage]:
        """The messages of the request, without its instructions."""
        return self._chat.messages[bool(self._body.instructions) :]

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        asked = self._body.model_dump(mode="json", by_alias=True, exclude_none=True)
        echoed = ("instructions", "max_output_tokens", "previous_response_id", "metadata", "user")
        sampling = self.text.request.sampling
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status,
            "model": self._service.model, "error": None, "incomplete_details": None, "output": [],
            "usage": None, "background": False, "truncation": "disabled",
            "temperature": sampling.temperature, "top_p": sampling.top_p,
            "store": self._body.store is not False,
            "parallel_tool_calls": self._body.parallel_tool_calls is not False,
            "tools": asked.get("tools", []), "tool_choice": asked.get("tool_choice", "auto"),
            "text": asked.get("text", {"format": {"type": "text"}}),
            "reasoning": asked.get("reasoning", {"effort": None, "summary": None}),
            **{name: asked.get(name) for name in echoed},
            **more,
        }  # fmt: skip


def _id(block: Block) -> str:
    return f"{_PREFIX[block.kind]}_{block.own_id}"


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: Block, status: str) -> dict[str, Any]:
    own_id = _id(block)
    if block.call is not None:
        return {
            "id": own_id, "type": "function_call", "status": status, "call_id": block.call.id,
            "name": block.call.name, "arguments": block.text,
        }  # fmt: skip
    told = {"id": own_id, "status": status, "content": [_part(block)]}
    if block.kind == "thinking":
        return {**told, "type": "reasoning", "summary": []}
    return {**told, "type": "message", "role": "assistant"}


def _message(blocks: list[Block]) -> ChatMessage:
    """The reply as a message of the conversation."""
    calls = [
        ToolCall(
            id=block.call.id, function=FunctionCall(name=block.call.name, arguments=block.text)
        )
        for block in blocks
        if block.call is not None
    ]
    text = "".join(block.text for block in blocks if block.kind == "text")
    return ChatMessage(role="assistant", content=text, tool_calls=calls or None)
