"""The server's life: a socket, requests, and an end that every open stream is told of."""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from specexec_cli.errors import ConfigError
from specexec_cli.serve.app import create_app
from specexec_cli.serve.guards import Access
from specexec_cli.serve.service import Service

_GRACE_S = 10  # for streams to take their last words, once their texts have ended


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound; port 0 takes any that is free.

    Raises:
        ConfigError: the address cannot be listened on.
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


class Server(uvicorn.Server):
    """uvicorn's server, which at its end also ends the texts that its streams wait for.

    Args:
        ready: called when it answers.
    """

    def __init__(
        self, service: Service, access: Access, ready: Callable[[], None] = lambda: None
    ) -> None:
        self.interrupted = False  # by Ctrl-C
        self._service = service
        self._ready = ready
        super().__init__(
            uvicorn.Config(
                create_app(service, access), lifespan="off", log_level="warning",
                access_log=False, server_header=False, ws="none",
                timeout_graceful_shutdown=_GRACE_S,
            )
        )  # fmt: skip

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self._ready()

    def stop(self) -> None:
        """Ends texts, streams and the server; from any thread, and from a signal's handler."""
        self._service.closing = True
        self.should_exit = True
        # it waits for the pass, which neither the loop nor a signal's handler may
        threading.Thread(target=self._service.stop, name="specexec-stop").start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ctrl-C, or a service manager's SIGTERM; the second one does not wait for streams.

        uvicorn would send itself the signal once more at its end, and SIGTERM would not let the
        session keep what it has learned.
        """
        self.interrupted = self.interrupted or sig == signal.SIGINT
        if self.should_exit:
            self.force_exit = True
        self.stop()
