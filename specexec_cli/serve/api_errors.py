"""Errors as clients expect them: OpenAI's {"error": {"message", "type", "param", "code"}}, and
Anthropic's {"type": "error", "error": {"type", "message"}} where the path is of its protocol."""

from __future__ import annotations

import logging
import re
from typing import Any

from specexec_cli.engine.text import QueueFullError
from specexec_cli.errors import ConfigError, SpecexecError

_FOLDERS = re.compile(r"""(?<![^\s'"(])~?/(?:[^:\n]|:(?! ))*/""")  # names may hold anything
_ANTHROPIC_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_LOG = logging.getLogger("uvicorn.error")
GONE = 499  # nginx's status for a client that closed the connection
_MOST_LETTERS = 600  # most letters of a message: some messages repeat the client's input


class ApiError(Exception):
    """An error that is sent as the answer to a request.

    Args:
        status: HTTP status code.
        param: the wrong field of the body.
        code: a word by which programs can recognize the error.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, param, code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The object that reports an error, in a response or in a stream."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    message = message if len(message) <= _MOST_LETTERS else f"{message[:_MOST_LETTERS]}..."
    param = param and param[:_MOST_LETTERS]
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_body(status: int, message: str) -> dict[str, Any]:
    """The object that reports an error to Anthropic's clients."""
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def shaped(path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """An error's object in the form of the protocol that a path belongs to."""
    if path != "/v1/messages" and not path.startswith("/v1/messages/"):
        return body
    return anthropic_body(status, body["error"]["message"])


def without_folders(text: str) -> str:
    """A message in which files are named without their folders, which are private."""
    return _FOLDERS.sub("", text)


def api_error(error: Exception) -> ApiError:
    """The ApiError for an error that other rooms raised."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, ConfigError):
        return ApiError(400, str(error))
    if isinstance(error, SpecexecError):
        told = without_folders(str(error))
        if told != str(error):
            _LOG.error("%s", error)
        return ApiError(500, told, code=type(error).__name__)
    return ApiError(500, "an error of specexec itself: its log has the traceback", code="bug")
