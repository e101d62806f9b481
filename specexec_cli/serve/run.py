"""Runs the server: opens its socket, serves requests, and ends all open streams properly."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from specexec_cli.errors import ConfigError
from specexec_cli.serve.app import create_app
from specexec_cli.serve.connections import Connection, NoRoom, most_connections, own
from specexec_cli.serve.guards import Access
from specexec_cli.serve.models import Models

_GRACE_S = 10  # time for streams to send their last chunks after their texts have ended
_ACCEPTED = 64  # connections that the event loop accepts before it serves open ones again
_WAITING = 2048  # connections that the system holds until they are accepted


def listen(host: str, port: int) -> socket.socket:
    """Binds a socket; port 0 takes any free port.

    Raises:
        ConfigError: the server cannot listen on this address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}. Use `host`") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is taken: choose another with `port`") from error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}. Use `host` and `port`"
        ) from error
    return found


def _not_cancelled(record: logging.LogRecord) -> bool:
    """A log filter that leaves out requests that were cut off when the server ended."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class Server(uvicorn.Server):
    """uvicorn's server; when it ends, it also ends the texts that streams wait for.

    Args:
        ready: called when the server answers requests.
    """

    def __init__(
        self, models: Models, access: Access, ready: Callable[[], None] = lambda: None
    ) -> None:
        self.interrupted = False  # whether Ctrl-C has ended the server
        self._models = models
        self._ready = ready
        now = models.figures()
        protocol: Any = partial(Connection, most=most_connections(now.slots + now.most_waiting))
        super().__init__(
            uvicorn.Config(
                create_app(models, access), lifespan="off", access_log=False, server_header=False,
                # warnings are about the input of strangers, and would fill the log
                log_level="error", http=protocol, ws="none", backlog=_ACCEPTED,
                timeout_graceful_shutdown=_GRACE_S + 5,
            )
        )  # fmt: skip
        logging.getLogger("uvicorn.error").addFilter(_not_cancelled)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        asyncio.get_running_loop().set_exception_handler(NoRoom(self._connections))
        await super().startup(sockets)
        for address in sockets or []:
            address.listen(_WAITING)
        gc.collect()
        self._ticking = asyncio.create_task(self._models.tick())
        gc.freeze()  # objects of models and libraries: searching them took a third of a second
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn, which calls it ten times a second."""
        if counter % 10 == 0:
            for connection in self._connections():
                connection.check()
            if self._ticking.done():
                self._ticking = asyncio.create_task(self._models.tick())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn, which would cancel responses that still wait for their clients."""
        asyncio.get_running_loop().call_later(_GRACE_S, self._leave)
        await super().shutdown(sockets)
        gc.unfreeze()

    def _leave(self) -> None:
        for connection in self._connections():
            connection.transport.abort()

    def _connections(self) -> list[Connection]:
        return own(self.server_state.connections)

    def stop(self) -> None:
        """Ends texts, streams and the server; may be called in any thread or signal handler."""
        self._models.closing = True
        self.should_exit = True
        # in a thread, because it waits for the pass, and neither the event loop nor a
        # signal handler may wait
        threading.Thread(target=self._models.stop, name="specexec-stop").start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles Ctrl-C or a service manager's SIGTERM; a second signal does not wait for streams.

        uvicorn's own handler would raise the signal again at its end, and SIGTERM would then end
        the process before the session has saved what it has learned.
        """
        self.interrupted = self.interrupted or sig == signal.SIGINT
        if self.should_exit:
            self.force_exit = True
        self.stop()
