"""Connections of strangers: how many there are at once, and how long each may take to ask.

uvicorn waits for the rest of a request for ever. Whoever opens connections and sends half a request
would leave none for others, so each stage of a request has a deadline, and where there are as many
connections as may be, a new one takes the place of one that waits for its client.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specexec_cli.serve.api_errors import error_body

HEADER_S = 10.0  # for the line and headers of a request, and to close a connection
BODY_S = 30.0  # for a body
BODY_BYTES_PER_S = 16 << 10  # and a second more for so many bytes of it that came
_PIECES, _PIECE_BYTES = 1000, 256  # most reads or chunks of a body, but for those as large as this
_USUAL = 1000  # connections, beside those whose texts are under way or wait
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TOLD_EACH_S = 60.0
_LOG = logging.getLogger("uvicorn.error")

_Stage = Literal["asks", "sends", "waits", "leaves"]


def raise_descriptors() -> int:
    """Lets this process open as many files as its user may; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, 10_240):  # macOS has a limit of its own where there is none here
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
        except (OSError, ValueError):
            continue
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def most_connections(texts: int) -> int:
    """Connections that there is room for; half of the descriptors are left to other files.

    Args:
        texts: that may be under way or wait, each with a connection.
    """
    free = raise_descriptors() - len(os.listdir("/dev/fd"))
    return min(_USUAL + texts, max(free // 2, 8))


class Connection(H11Protocol):
    """One connection, which its client must use in time.

    Args:
        most: connections at once.
    """

    def __init__(self, *args: Any, most: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Counted(h11.SERVER)
        self._most = most
        self._stage: _Stage = "asks"
        self._since_s = 0.0  # when the stage began
        self._came_bytes = 0  # in this stage

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol; makes room where there is none."""
        full = len(self.connections) >= self._most
        if full:  # several at once, since it takes a look at all of them
            full = not close_idle(own(self.connections), 1 + self._most // 16)
        super().connection_made(transport)
        self._since_s = self.loop.time()
        if full:
            self._refuse(503, "Service Unavailable", "too many connections: try again later")

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._look()
        self._came_bytes += len(data)

    def send_400_response(self, msg: str) -> None:
        """See H11Protocol, which would also answer twice."""
        self._refuse(400, "Bad Request", msg)

    def shutdown(self) -> None:
        """See H11Protocol, which waits for requests that are half sent."""
        if self._look() == "sends":
            self._refuse(503, "Service Unavailable", "the server is shutting down")
        else:
            super().shutdown()

    @property
    def idle(self) -> bool:
        """Whether it waits for its client, so that nothing of the server's is lost with it."""
        return self._look() != "waits" or self.flow.write_paused

    @property
    def address(self) -> str:
        """The client's machine."""
        return self.client[0] if self.client else ""

    @property
    def since_s(self) -> float:
        """When the client was last done with a part of its request, on the loop's clock."""
        return self._since_s

    def check(self) -> None:
        """Ends the connection if its client takes too long."""
        stage, waited_s = self._look(), self.loop.time() - self._since_s
        if stage == "asks" and waited_s > HEADER_S:
            if self._came_bytes:
                self._refuse(408, "Request Timeout", f"no whole request came in {HEADER_S:g} s")
            else:
                self.transport.close()  # browsers open connections before they need them
        elif stage == "sends" and waited_s > BODY_S + self._came_bytes / BODY_BYTES_PER_S:
            self._refuse(408, "Request Timeout", f"no whole body came in {waited_s:.0f} s")
        elif stage == "leaves" and waited_s > HEADER_S:
            self.transport.abort()

    def _look(self) -> _Stage:
        """What the connection does now; notes when that began."""
        now: _Stage = "waits"
        if self.transport.is_closing():
            now = "leaves"
        elif self.conn.their_state is h11.IDLE:
            now = "asks"
        elif self.conn.their_state is h11.SEND_BODY:
            now = "sends"
        if now != self._stage:
            self._stage, self._since_s, self._came_bytes = now, self.loop.time(), 0
        return now

    def _refuse(self, status: int, reason: str, message: str) -> None:
        """Answers, unless an answer has begun, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error_body(status, message)).encode()
            head = (
                f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


class _Counted(h11.Connection):
    """HTTP, whose bodies come in pieces of some size: each takes the event loop's time."""

    def __init__(self, role: Any) -> None:
        super().__init__(role)
        self._pieces = self._bytes = 0

    def next_event(self) -> Any:
        """See h11.

        Raises:
            h11.RemoteProtocolError: the pieces are too small.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._pieces, self._bytes = self._pieces + 1, self._bytes + len(event.data)
            if self._pieces > _PIECES + self._bytes // _PIECE_BYTES:
                raise h11.RemoteProtocolError("the body comes in too many pieces")
        return event


def own(connections: Iterable[object]) -> list[Connection]:
    """Those of uvicorn's connections that are of this module's kind, as all of a server are."""
    return [one for one in connections if isinstance(one, Connection)]


def close_idle(connections: Iterable[Connection], count: int) -> int:
    """Ends connections that wait for their clients: of the address with most of them, the oldest.

    Args:
        count: of connections to end.
    Returns:
        how many were ended.
    """
    idle = [one for one in connections if one.idle]
    held = Counter(one.address for one in idle)
    idle.sort(key=lambda one: (-held[one.address], one.since_s))
    for one in idle[:count]:
        one.transport.abort()
        one.connections.discard(one)
    return len(idle[:count])


class NoRoom:
    """The event loop's exception handler: connections that cannot be accepted end idle ones.

    asyncio tells of each try, of which there are many a second.

    Args:
        connections: of the server, now.
    """

    def __init__(self, connections: Callable[[], list[Connection]]) -> None:
        self._connections = connections
        self._closed_s = self._told_s = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """See loop.set_exception_handler."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
            loop.default_exception_handler(context)
            return
        now_s = loop.time()
        if now_s - self._closed_s > 0.5:
            self._closed_s = now_s
            close_idle(self._connections(), 32)
        if now_s - self._told_s > _TOLD_EACH_S:
            self._told_s = now_s
            _LOG.error("a connection cannot be accepted: %s", error.strerror)
