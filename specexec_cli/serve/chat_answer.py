"""/v1/chat/completions: the reply in its parts, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from specexec_cli.core import StepResult
from specexec_cli.serve import answers
from specexec_cli.serve.bodies import ChatBody
from specexec_cli.serve.chat_completions import Asked
from specexec_cli.serve.completions import ChoicesAnswer
from specexec_cli.serve.reply import Said
from specexec_cli.serve.service import Service


class ChatAnswer(ChoicesAnswer):
    """The response of /v1/chat/completions."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, request: Request, body: ChatBody, asked: Asked) -> None:
        super().__init__(service, request, body, asked.texts)
        self._replies = [asked.splitter(index) for index in range(len(asked.texts))]
        self._said = [Said() for _ in asked.texts]

    def begun(self, index: int) -> dict[str, Any] | None:
        """See ChoicesAnswer."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, steps: Sequence[StepResult], ended: bool) -> dict[str, Any] | None:
        """See ChoicesAnswer."""
        said = self._replies[index].take([step.text for step in steps], ended)
        self._said[index] += said
        logprobs = [one for step in steps for one in step.logprobs]
        self._logprobs[index] += logprobs
        delta: dict[str, Any] = {}
        if said.content:
            delta["content"] = said.content
        if said.thinking:
            delta["reasoning_content"] = said.thinking
        if said.calls:
            delta["tool_calls"] = answers.tool_calls(said.calls, streamed=True)
        if not delta and not logprobs:
            return None
        told = self._spelling().chat(logprobs) if logprobs else None
        return {"index": index, "delta": delta, "logprobs": told, "finish_reason": None}

    def last(self, index: int) -> dict[str, Any]:
        """See ChoicesAnswer."""
        reason = answers.finish_reason(self._texts[index], bool(self._said[index].calls))
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def choice(self, index: int) -> dict[str, Any]:
        """See ChoicesAnswer."""
        said, logprobs = self._said[index], self._logprobs[index]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said.content if said.content or not said.calls else None,
            "refusal": None,
        }
        if said.thinking:
            message["reasoning_content"] = said.thinking
        if said.calls:
            message["tool_calls"] = answers.tool_calls(said.calls, streamed=False)
        return {
            "index": index,
            "message": message,
            "logprobs": self._spelling().chat(logprobs) if logprobs else None,
            "finish_reason": answers.finish_reason(self._texts[index], bool(said.calls)),
        }
