"""Clients that hold connections: half requests, slow bodies, more than there is room for."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serving import always_open

from specexec_cli.engine.text import EngineFigures
from specexec_cli.serve import connections
from specexec_cli.serve.guards import Access
from specexec_cli.serve.reading import Window
from specexec_cli.serve.run import Server, listen

HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
MOST = 10


class Idle:
    """An engine with nothing to do."""

    def figures(self) -> EngineFigures:
        return EngineFigures(
            slots=1, running=0, waiting=0, most_waiting=0, passes=0, generated_tokens=0,
            bytes_streamed=0, texts={},
        )  # fmt: skip


@contextmanager
def served() -> Iterator[tuple[int, Server]]:
    """A server without a model, and its port."""

    async def encoding(work: Any, body_bytes: int) -> Any:
        return work(None)

    service: Any = SimpleNamespace(
        engine=Idle(), closing=False, stop=lambda: None, model="toy", context_length=64, layers=2,
        draft=None, facts={}, encoding=encoding,
        window=Window(context_tokens=64, token_characters=16),
    )  # fmt: skip
    server = Server(always_open(service), Access(host="127.0.0.1"))
    with listen("127.0.0.1", 0) as address:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [address]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield address.getsockname()[1], server
        finally:
            server.stop()
            thread.join()


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_USUAL", MOST - 1)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_S", 0.1)
    monkeypatch.setattr(connections, "BODY_S", 0.1)


def opened(port: int, sent: bytes) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=30)
    found.sendall(sent)
    return found


def answer(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    read = b""
    while part := client.recv(65536):
        read += part
    return read


def test_half_open_connections_leave_room_for_others(limited: None) -> None:
    with served() as (port, server), ExitStack() as held:
        clients = [held.enter_context(opened(port, HALF)) for _ in range(30)]
        for _ in range(5):
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
            assert len(server.server_state.connections) <= MOST
        newest = clients[-1]
        newest.sendall(b"x\r\n\r\n")
        assert newest.recv(12) == b"HTTP/1.1 200", "the oldest ones went"


def test_where_nobody_waits_for_a_client_a_new_one_is_told(
    limited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.Connection, "idle", False)
    with served() as (port, _), ExitStack() as held:
        for _ in range(MOST):
            held.enter_context(opened(port, HALF))
        with opened(port, b"") as late:
            assert b"503 Service Unavailable" in answer(late)


def test_whoever_takes_too_long_is_not_waited_for(hurried: None) -> None:
    cases = {
        HALF: b"408 Request Timeout",
        b"": b"",
        POST + b"Content-Length: 9\r\n\r\n{": b"408 Request Timeout",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n": b"408 Request Timeout",
        # refused before the body came
        b"POST /x HTTP/1.1\r\nHost: evil\r\nContent-Length: 9\r\n\r\n{": b"403 Forbidden",
    }
    with served() as (port, server), ExitStack() as held:
        clients = [held.enter_context(opened(port, sent)) for sent in cases]
        for client, told in zip(clients, cases.values(), strict=True):
            found = answer(client)
            assert found.count(b"HTTP/1.1") == bool(told), found
            assert told in found
        assert server.server_state.connections == set()


def test_bytes_of_a_body_that_come_win_time(hurried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_BYTES_PER_S", 1)
    with served() as (port, _), opened(port, POST + b"Content-Length: 90\r\n\r\n{") as client:
        client.settimeout(1.5)
        client.sendall(b" " * 60)
        with pytest.raises(TimeoutError):
            client.recv(1)


def test_a_body_in_crumbs_is_refused() -> None:
    crumbs = b"1\r\n \r\n" * 3000
    with served() as (port, _):
        with opened(port, POST + b"Transfer-Encoding: chunked\r\n\r\n" + crumbs) as client:
            assert b"400 Bad Request" in answer(client)
        whole = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions", content=(b" " * 300 for _ in range(3000)),
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
        assert "not JSON" in whole.text


def test_nonsense_behind_an_answer_is_no_error_of_the_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chunked = b"POST /x HTTP/1.1\r\nHost: evil\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served() as (port, _):
        for sent in (b"\x00\xff\r\n\r\n", HALF + b"\r\n\r\n\x00\r\n\r\n"):
            with opened(port, sent) as client:
                assert b"400 Bad Request" in answer(client)
        with opened(port, chunked) as client:
            assert client.recv(12) == b"HTTP/1.1 403"
            client.sendall(b"no size\r\n\r\n")
            assert b"400" not in answer(client)
    assert capsys.readouterr().err == ""


def test_the_end_does_not_wait_for_half_a_body(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as (port, _), opened(port, POST + b"Content-Length: 9\r\n\r\n{") as client:
        httpx.get(f"http://127.0.0.1:{port}/health")
        began = time.monotonic()
    assert time.monotonic() - began < 5, "half of what streams are left at the end"
    with closing(client):
        assert capsys.readouterr().err == ""


class Held:
    """A connection, as close_idle sees it."""

    def __init__(self, address: str, since_s: float, idle: bool = True) -> None:
        self.address, self.since_s, self.idle = address, since_s, idle
        self.connections = {self}
        self.transport = SimpleNamespace(abort=lambda: None)


def test_descriptors_that_run_out_are_told_of_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Each of them is a try of the event loop's to accept a connection."""
    loop: Any = SimpleNamespace(time=time.monotonic, default_exception_handler=print)
    held = Held("10.0.0.1", 0.0)
    handler = connections.NoRoom(lambda: [held])  # type: ignore[list-item]
    for _ in range(1000):
        handler(loop, {"exception": OSError(errno.EMFILE, "Too many open files")})
    assert held.connections == set()
    assert [record.getMessage() for record in caplog.records] == [
        "a connection cannot be accepted: Too many open files"
    ]
    handler(loop, {"message": "something else"})
    assert "something else" in capsys.readouterr().out


def test_of_many_addresses_the_one_with_most_connections_gives_way() -> None:
    busy = [Held("b", float(at), idle=False) for at in range(5)]
    c1, c2, c3 = (Held("c", float(at)) for at in (1, 2, 3))
    everybody: Any = [Held("a", 0.0), c3, *busy, c2, c1]
    assert connections.close_idle(everybody, 2) == 2
    assert [one for one in everybody if not one.connections] == [c2, c1]


def test_half_of_the_descriptors_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
        assert connections.raise_descriptors() == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    opened = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(connections, "raise_descriptors", lambda: opened + 101)
    assert connections.most_connections(4) in (49, 50, 51)
    monkeypatch.setattr(connections, "raise_descriptors", lambda: 1 << 20)
    assert connections.most_connections(4) == 1004
