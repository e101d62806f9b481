"""Checks who may send requests, before a request reaches a route."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specexec_cli.errors import ConfigError
from specexec_cli.serve.api_errors import error_body, shaped

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#*@]+")  # also those of apps and extensions
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_OPEN_PATHS = ("/", "/health", "/page/")  # paths that need no key
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The rules for who may send requests.

    Raises:
        ConfigError: the key cannot be sent in an HTTP header, or an origin is not one of a page.
    """

    host: str  # name or address that the server listens on
    api_key: str | None = None
    origins: tuple[str, ...] = ()  # origins of other pages that may ask, as browsers write them

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and (not key.isascii() or not key.isprintable() or key != key.strip()):
            raise ConfigError(
                "the API key has white space at its ends, or letters that HTTP headers cannot "
                "carry: use printable ASCII in `api_key` or SPECEXEC_API_KEY"
            )
        origins = tuple(origin.strip().rstrip("/").lower() for origin in self.origins)
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"`cors_origin` '{origin[:100]}' is no page's origin: name each page that may "
                    "ask, as in https://chat.example"
                )
        object.__setattr__(self, "origins", origins)

    @property
    def loopback(self) -> bool:
        """Whether only programs on this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a name or address to listen on is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Refuses forbidden requests, and adds security headers to responses.

    A page of another site can make its visitor's browser send requests to this server. On loopback
    the page's own host name may even lead to this machine (DNS rebinding), so requests to other
    names than this machine's are refused. Requests from other origins are refused too, unless
    `origins` lists them.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._names: Collection[str] = {*_LOCAL_NAMES, access.host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope["path"], scope["method"], Headers(scope=scope))
        if refusal is not None:
            status, text, code = refusal
            told = shaped(scope["path"], status, error_body(status, text, code=code))
            response = JSONResponse(told, status)
            await response(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _refusal(self, path: str, method: str, headers: Headers) -> tuple[int, str, str] | None:
        access = self._access
        host = headers.get("host", "")
        if access.loopback and _name(host) not in self._names:
            return 403, f"this server is not called '{host[:100]}'", "wrong_host"
        origin = headers.get("origin")
        if origin is not None and origin not in access.origins and _netloc(origin) != host.lower():
            return 403, f"pages of {origin[:100]} may not ask: `cors_origin`", "wrong_origin"
        if method == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return 415, "the body must be JSON (Content-Type: application/json)", "not_json"
        open_ = path in _OPEN_PATHS or path.startswith("/page/")
        if access.api_key is not None and not open_:
            right = (
                hmac.compare_digest(key.encode(), access.api_key.encode()) for key in _keys(headers)
            )
            if not any(right):
                return 401, "wrong or missing API key", "invalid_api_key"
        return None


def _keys(headers: Headers) -> Iterator[str]:
    """The keys that a request brings, as OpenAI's or as Anthropic's clients send them."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield given.strip()
    if "x-api-key" in headers:
        yield headers["x-api-key"].strip()


def _name(host: str) -> str:
    """A Host header without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
