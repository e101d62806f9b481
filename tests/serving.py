"""A server in this process, on a port of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from specexec_cli.config import SamplingConfig
from specexec_cli.engine.factory import open_engine
from specexec_cli.serve.guards import Access
from specexec_cli.serve.models import Models, Offered
from specexec_cli.serve.run import Server, listen
from specexec_cli.serve.service import Defaults, Service
from specexec_cli.session import TextSession


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    url: str
    service: Service
    server: Server
    models: Models


@contextmanager
def served(
    session: TextSession,
    *,
    slots: int = 3,
    most_waiting: int = 32,
    api_key: str | None = None,
    origins: tuple[str, ...] = (),
) -> Iterator[Served]:
    """A server over a session, which others may not use meanwhile."""
    service = Service(
        session,
        open_engine(session, slots=slots, most_waiting=most_waiting),
        Defaults(sampling=SamplingConfig(), max_tokens=16),
    )
    access = Access(host="127.0.0.1", api_key=api_key, origins=origins)
    models = always_open(service)
    try:
        server = Server(models, access)
        with running(server) as url:
            yield Served(url, service, server, models)
    finally:
        service.close()


def always_open(service: Service) -> Models:
    """A server's models: the one that is open already."""
    return Models([Offered(names=(service.model,), open=lambda: service)], service)


@contextmanager
def running(server: Server) -> Iterator[str]:
    """Runs a server on a port of its own; yields its address."""
    with listen("127.0.0.1", 0) as socket:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        finally:
            server.stop()
            thread.join()


def is_idle(url: str) -> bool:
    """Whether no text is under way or waits."""
    now = httpx.get(f"{url}/health").json()
    return not now["running"] and not now["waiting"]


def wait_until_idle(url: str, timeout_s: float = 30.0) -> None:
    """Waits until every text has ended."""
    ends = time.monotonic() + timeout_s
    while not is_idle(url):
        assert time.monotonic() < ends, "texts are left over"
        time.sleep(0.02)


@contextmanager
def speaking(served: Served, template: str) -> Iterator[None]:
    """The server's model has another chat template."""
    tokenizer = served.service.tokenizer
    usual, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        yield
    finally:
        tokenizer.chat_template = usual
