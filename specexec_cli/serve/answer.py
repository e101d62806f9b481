"""The response to one request: the texts are followed, and their ends checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from specexec_cli.engine.text import Running
from specexec_cli.serve import answers
from specexec_cli.serve.api_errors import GONE, ApiError, api_error
from specexec_cli.serve.follow import Change, follow
from specexec_cli.serve.service import Service

SILENCE_S = 10.0  # longest silence, so that no proxy takes the connection for dead


class Answer(ABC):
    """The response to one request, of one protocol.

    Args:
        texts: the request's texts, in the order of the choices.
        stream: whether the parts are sent as they come.
    """

    def __init__(
        self, service: Service, request: Request, texts: Sequence[Running], stream: bool | None
    ) -> None:
        self._service = service
        self._request = request
        self._texts = texts
        self._streamed = stream

    @abstractmethod
    def _take(self, change: Change) -> Any:
        """Takes new steps of a text, or its end; returns what a stream sends of them."""

    @abstractmethod
    def _whole(self) -> dict[str, Any]:
        """The whole response; to be called after every change was taken."""

    @abstractmethod
    def _stream(self) -> AsyncIterator[bytes]:
        """The events of the response as a stream."""

    async def response(self) -> Response:
        """The response, streamed if the request asks for a stream."""
        if self._streamed:
            return StreamingResponse(
                self._stream(),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        async for change in follow(self._request, self._texts, SILENCE_S):
            if change is not None:
                self._take(change)
        self._check_ends()
        return JSONResponse(self._whole())

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
            raise ApiError(GONE, "the client has gone away", code="cancelled")

    def _spelling(self) -> answers.Spelling:
        """The service's Spelling, which exists if the request needs it."""
        assert self._service.spelling is not None
        return self._service.spelling
