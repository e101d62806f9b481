"""Runs a request's texts in the engine and writes the response, streamed or whole."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from specexec_cli.core import StepResult, TokenLogprobs
from specexec_cli.engine.text import Running
from specexec_cli.serve import answers
from specexec_cli.serve.api_errors import ApiError, api_error
from specexec_cli.serve.bodies import ChatBody, CompletionBody
from specexec_cli.serve.follow import follow
from specexec_cli.serve.service import Service

_PROGRESS_S = 0.25  # time between two reports of a pass's progress
_SILENCE_S = 10.0  # longest silence, so that no proxy takes the connection for dead
_GONE = 499  # nginx's status for a client that closed the connection


class Answer(ABC):
    """The response to one request, of one kind of completion.

    Args:
        texts: the request's texts, in the order of the choices.
    """

    object: str  # the protocol's name for a whole response
    chunk_object: str  # the protocol's name for a part of a stream

    def __init__(
        self,
        service: Service,
        request: Request,
        body: ChatBody | CompletionBody,
        texts: Sequence[Running],
    ) -> None:
        self._service = service
        self._request = request
        self._body = body
        self._texts = texts
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

    async def response(self) -> Response:
        """The response, streamed if the request asks for a stream."""
        if self._body.stream:
            return StreamingResponse(
                self._stream(),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        async for change in follow(self._request, self._texts, _SILENCE_S):
            if change is not None:
                self.part(change.index, change.steps, change.ended)
        self._check_ends()
        choices = [self.choice(index) for index in range(len(self._texts))]
        return JSONResponse(
            {**self._head, "object": self.object, "choices": choices,
             "usage": answers.usage(self._texts, self._body.n or 1)}
        )  # fmt: skip

    def _check_ends(self) -> None:
        """Checks that every text is complete.

        Raises:
            ApiError: a text has failed or was cancelled.
        """
        for text in self._texts:
            if text.finish == "failed" and text.error is not None:
                raise api_error(text.error)
        if any(text.finish is None or text.finish == "cancelled" for text in self._texts):
            if self._service.closing:
                raise ApiError(503, "the server is shutting down", code="shutting_down")
            raise ApiError(_GONE, "the client has gone away", code="cancelled")

    async def _stream(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        told = options is not None and options.include_progress
        for index in range(len(self._texts)):
            if (first := self.begun(index)) is not None:
                yield self._chunk([first])
        reported_s = 0.0
        async for change in follow(self._request, self._texts, _PROGRESS_S if told else _SILENCE_S):
            if told and time.monotonic() - reported_s >= _PROGRESS_S:
                reported_s = time.monotonic()
                if (now := answers.progress(self._texts, self._waiting())) is not None:
                    yield self._chunk([], specexec=now)
            if change is None:
                if not told:
                    yield answers.KEEP_ALIVE
                continue
            part = self.part(change.index, change.steps, change.ended)
            if part is not None:
                yield self._chunk([part])
            text = self._texts[change.index]
            if change.ended and text.finish not in ("failed", "cancelled"):
                yield self._chunk([self.last(change.index)])
        try:
            self._check_ends()
        except ApiError as error:
            if error.status == _GONE:
                return
            yield answers.event(error.body)
        else:
            if options is not None and options.include_usage:
                yield self._chunk([], usage=answers.usage(self._texts, self._body.n or 1))
        yield answers.END

    def _spelling(self) -> answers.Spelling:
        """The service's Spelling, which exists if a request asked for log-probabilities."""
        assert self._service.spelling is not None
        return self._service.spelling

    def _waiting(self) -> int:
        return self._service.engine.figures().waiting

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return answers.event(
            {**self._head, "object": self.chunk_object, "choices": choices, **more}
        )


class CompletionAnswer(Answer):
    """The response of /v1/completions."""

    object = chunk_object = "text_completion"

    def __init__(
        self, service: Service, request: Request, body: CompletionBody, texts: Sequence[Running]
    ) -> None:
        super().__init__(service, request, body, texts)
        self._said = ["" for _ in texts]

    def begun(self, index: int) -> dict[str, Any] | None:
        """See Answer."""
        return None

    def part(self, index: int, steps: Sequence[StepResult], ended: bool) -> dict[str, Any] | None:
        """See Answer."""
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
        """See Answer."""
        reason = answers.finish_reason(self._texts[index])
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def choice(self, index: int) -> dict[str, Any]:
        """See Answer."""
        logprobs = self._logprobs[index]
        return {
            **self.last(index),
            "text": self._said[index],
            "logprobs": self._spelling().completion(logprobs, 0) if logprobs else None,
        }
