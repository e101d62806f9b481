"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import re
from typing import Any

from specexec_cli.engine.text import QueueFullError
from specexec_cli.errors import ConfigError, SpecexecError

_FOLDERS = re.compile(r"""(?<![^\s'"(])~?/(?:[^:\n]|:(?! ))*/""")  # whatever their names hold
_LOG = logging.getLogger("uvicorn.error")
_MOST_LETTERS = 600  # of a message: some repeat what a client sent


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        param: the field of the body that is wrong.
        code: a word that programs may look for.
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
    """The object that tells of an error, in a response or in the middle of a stream."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    message = message if len(message) <= _MOST_LETTERS else f"{message[:_MOST_LETTERS]}..."
    param = param and param[:_MOST_LETTERS]
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def without_folders(text: str) -> str:
    """A message with the names of its files alone: where they lie is nobody's business."""
    return _FOLDERS.sub("", text)


def api_error(error: Exception) -> ApiError:
    """What a request is told of an error in the rooms below."""
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
