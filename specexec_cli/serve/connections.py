"""Limits the number of connections, and the time that clients may take to send a request.

uvicorn waits for the rest of a request for ever, so a client that opens many connections and sends
half a request on each would leave none for others. Here each stage of a request has a deadline, and
when all connections are taken, a new one replaces one that is waiting for its client.
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

HEADER_S = 10.0  # time for a request's first line and headers, and for closing a connection
BODY_S = 30.0  # time for a body
BODY_BYTES_PER_S = 16 << 10  # a body gets one more second for this many received bytes
_PIECES, _PIECE_BYTES = 1000, 256  # most pieces of a body, and one more for this many bytes
_USUAL = 1000  # most connections besides those with running or waiting texts
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TOLD_EACH_S = 60.0
_LOG = logging.getLogger("uvicorn.error")

_Stage = Literal["asks", "sends", "waits", "leaves"]


def raise_descriptors() -> int:
    """Raises this process's limit of open files to the highest allowed; returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, 10_240):  # macOS has a limit even if the hard limit is infinite
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
        except (OSError, ValueError):
            continue
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def most_connections(texts: int) -> int:
    """The most connections at once; half of the file descriptors are left for other files.

    Args:
        texts: most texts that may run or wait at once, each with a connection.
    """
    free = raise_descriptors() - len(os.listdir("/dev/fd"))
    return min(_USUAL + texts, max(free // 2, 8))


class Connection(H11Protocol):
    """One connection, with deadlines for its client.

    Args:
        most: most connections at once.
    """

    def __init__(self, *args: Any, most: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Counted(h11.SERVER)
        self._most = most
        self._stage: _Stage = "asks"
        self._since_s = 0.0  # time at which the stage began
        self._came_bytes = 0  # bytes received in this stage

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol; if there are too many connections, ends idle ones."""
        full = len(self.connections) >= self._most
        if full:  # ends several at once, because looking at all connections takes time
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
        """See H11Protocol, which might answer a second time."""
        self._refuse(400, "Bad Request", msg)

    def shutdown(self) -> None:
        """See H11Protocol, which would wait for requests that are half sent."""
        if self._look() == "sends":
            self._refuse(503, "Service Unavailable", "the server is shutting down")
        else:
            super().shutdown()

    @property
    def idle(self) -> bool:
        """Whether the server waits for the client, so that ending the connection loses no work."""
        return self._look() != "waits" or self.flow.write_paused

    @property
    def address(self) -> str:
        """The address of the client's machine."""
        return self.client[0] if self.client else ""

    @property
    def since_s(self) -> float:
        """The time, on the event loop's clock, at which the present stage began."""
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
        """The present stage; records the time when it changes."""
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
        """Sends an error, unless an answer has begun, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error_body(status, message)).encode()
            head = (
                f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


class _Counted(h11.Connection):
    """HTTP that refuses bodies in too many small pieces, each of which takes the loop's time."""

    def __init__(self, role: Any) -> None:
        super().__init__(role)
        self._pieces = self._bytes = 0

    def next_event(self) -> Any:
        """See h11.

        Raises:
            h11.RemoteProtocolError: there are too many small pieces.
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
    """uvicorn's connections, typed as this module's class."""
    return [one for one in connections if isinstance(one, Connection)]


def close_idle(connections: Iterable[Connection], count: int) -> int:
    """Ends idle connections: first those of the address with the most, the oldest first.

    Args:
        count: most connections to end.
    Returns:
        the number of ended connections.
    """
    idle = [one for one in connections if one.idle]
    held = Counter(one.address for one in idle)
    idle.sort(key=lambda one: (-held[one.address], one.since_s))
    for one in idle[:count]:
        one.transport.abort()
        one.connections.discard(one)
    return len(idle[:count])


class NoRoom:
    """The event loop's exception handler, which ends idle connections when none can be accepted.

    asyncio calls it for every failed try, many times a second.

    Args:
        connections: returns the server's present connections.
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
