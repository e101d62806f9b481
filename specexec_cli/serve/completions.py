"""OpenAI's completions: choices whose texts are streamed in chunks or sent whole."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request

from specexec_cli.core import StepResult, TokenLogprobs
from specexec_cli.engine.text import Running
from specexec_cli.serve import answers
from specexec_cli.serve.answer import SILENCE_S, Answer
from specexec_cli.serve.api_errors import GONE, ApiError
from specexec_cli.serve.bodies import ChatBody, CompletionBody
from specexec_cli.serve.follow import Change, follow
from specexec_cli.serve.service import Service

_PROGRESS_S = 0.25  # time between two reports of a pass's progress


class ChoicesAnswer(Answer):
    """The response to one request of OpenAI's completions, with a choice for each text."""

    object: str  # the protocol's name for a whole response
    chunk_object: str  # the protocol's name for a part of a stream

    def __init__(
        self,
        service: Service,
        request: Request,
        body: ChatBody | CompletionBody,
        texts: Sequence[Running],
    ) -> None:
        super().__init__(service, request, texts, body.stream)
        self._body = body
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in texts]
        self._head = {
            "id": f"{'chatcmpl' if isinstance(body, ChatBody) else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.model,
        }

    @abstractmethod
    def begun(self, index: int) -> dict[str, Any] | None:
        """A choice's first part in a stream, before there is any text."""

    @abstractmethod
    def part(self, index: int, steps: Sequence[StepResult], ended: bool) -> dict[str, Any] | None:
        """A choice's next part in a stream; None if there is nothing to send yet."""

    @abstractmethod
    def last(self, index: int) -> dict[str, Any]:
        """A choice's last part in a stream, which says why it ended."""

    @abstractmethod
    def choice(self, index: int) -> dict[str, Any]:
        """A whole choice; to be called after every `part` of it."""

    def _take(self, change: Change) -> dict[str, Any] | None:
        return self.part(change.index, change.steps, change.ended)

    def _whole(self) -> dict[str, Any]:
        choices = [self.choice(index) for index in range(len(self._texts))]
        usage = answers.usage(self._texts, self._body.n or 1)
        return {**self._head, "object": self.object, "choices": choices, "usage": usage}

    async def _stream(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        told = options is not None and options.include_progress
        for index in range(len(self._texts)):
            if (first := self.begun(index)) is not None:
                yield self._chunk([first])
        reported_s = 0.0
        async for change in follow(self._request, self._texts, _PROGRESS_S if told else SILENCE_S):
            if told and time.monotonic() - reported_s >= _PROGRESS_S:
                reported_s = time.monotonic()
                if (now := answers.progress(self._texts, self._waiting())) is not None:
                    yield self._chunk([], specexec=now)
            if change is None:
                if not told:
                    yield answers.KEEP_ALIVE
                continue
            part = self._take(change)
            if part is not None:
                yield self._chunk([part])
            text = self._texts[change.index]
            if change.ended and text.finish not in ("failed", "cancelled"):
                yield self._chunk([self.last(change.index)])
        try:
            self._check_ends()
        except ApiError as error:
            if error.status == GONE:
                return
            yield answers.event(error.body)
        else:
            if options is not None and options.include_usage:
                yield self._chunk([], usage=answers.usage(self._texts, self._body.n or 1))
        yield answers.END

    def _waiting(self) -> int:
        return self._service.engine.figures().waiting

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return answers.event(
            {**self._head, "object": self.chunk_object, "choices": choices, **more}
        )


class CompletionAnswer(ChoicesAnswer):
    """The response of /v1/completions."""

    object = chunk_object = "text_completion"

    def __init__(
        self, service: Service, request: Request, body: CompletionBody, texts: Sequence[Running]
    ) -> None:
        super().__init__(service, request, body, texts)
        self._said = ["" for _ in texts]

    def begun(self, index: int) -> dict[str, Any] | None:
        """See ChoicesAnswer."""
        return None

    def part(self, index: int, steps: Sequence[StepResult], ended: bool) -> dict[str, Any] | None:
        """See ChoicesAnswer."""
        text = "".join(step.text for step in steps)
        logprobs = [one for step in steps for one in step.logprobs]
        before = len(self._said[index])
        self._said[index] += text
        self._logprobs[index] += logprobs
        if not text and not logprobs:
            return None
        told = self._spelling().completion(logprobs, before) if logprobs else None
        return {"index": index, "text": text, "logprobs": told, "finish_reason": None}

    def last(self, index: int) -> dict[str, Any]:
        """See ChoicesAnswer."""
        reason = answers.finish_reason(self._texts[index])
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def choice(self, index: int) -> dict[str, Any]:
        """See ChoicesAnswer."""
        logprobs = self._logprobs[index]
        return {
            **self.last(index),
            "text": self._said[index],
            "logprobs": self._spelling().completion(logprobs, 0) if logprobs else None,
        }
