"""Frames between machines: who does not know the token gets nothing, and nothing is changed."""

from __future__ import annotations

import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from checkpoints import random_tokens, random_tree

from specexec_cli.errors import ConfigError
from specexec_cli.hosts.messages import PassOrder, body_of, stream_of
from specexec_cli.hosts.pool import HostPool
from specexec_cli.hosts.wire import Wire, WireError, token_of_environment
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.planning.hosts import PORT, HostEntry, HostsFile, address_of
from specexec_cli.verify.masks import verification_rows

MOST = 8 << 20  # bytes of a body, where it does not matter


class Tapped:
    """A socket, of which what is sent is kept on its way once `caught` is there to take it."""

    def __init__(self, own: socket.socket) -> None:
        self.own, self.caught = own, None

    def sendall(self, data: bytes) -> None:
        (self.own.sendall if self.caught is None else self.caught.extend)(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def ends(
    one: bytes, other: bytes, sockets: Sequence[Any] | None = None
) -> tuple[Wire | WireError, Wire | WireError]:
    """Both ends of a connection, the first of which dialled, or what kept them apart."""
    sockets = sockets or _pair()

    def end(index: int, token: bytes) -> Wire | WireError:
        try:
            return Wire(sockets[index], token, dialled=not index, timeout_s=5)
        except WireError as error:
            return error

    with ThreadPoolExecutor(2) as both:
        return tuple(both.map(end, (0, 1), (one, other)))  # type: ignore[return-value]


_SOCKETS: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _SOCKETS:
        _SOCKETS.pop().close()


def on_its_way(sent: Mapping[str, str], body: bytes) -> tuple[Wire, Tapped, bytearray]:
    """The end that receives, the socket of the other, and a frame that has not arrived yet."""
    dialled, accepted = _pair()
    tapped = Tapped(dialled)
    one, other = ends(b"token", b"token", (tapped, accepted))
    assert isinstance(one, Wire)
    assert isinstance(other, Wire)
    tapped.caught = bytearray()
    one.send(sent, body)
    return other, tapped, tapped.caught


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        _SOCKETS.extend((dialled, server.accept()[0]))
        return _SOCKETS[-2], _SOCKETS[-1]


def test_frames_arrive_whole_and_in_order() -> None:
    one, other = ends(b"the same token", b"the same token")
    many = bytes(range(256)) * 20_000
    bodies = [(), (b"",), (b"x",), (many,), (b"a", memoryview(many), b"", bytearray(b"b"))]
    threading.Thread(
        target=lambda: [one.send({"kind": "n", "n": n}, *b) for n, b in enumerate(bodies)],
        daemon=True,
    ).start()
    for number, body in enumerate(bodies):
        assert other.receive(MOST, 5) == ({"kind": "n", "n": number}, bytearray(b"".join(body)))
    one.close()
    with pytest.raises(WireError, match="ended"):
        other.receive(MOST, 5)


def test_ends_with_different_tokens_part() -> None:
    for found in ends(b"one token", b"another token"):
        assert isinstance(found, WireError)
    assert "another token" in str(ends(b"one token", b"another token")[0])


def test_a_stranger_is_told_nothing_but_random_bytes() -> None:
    theirs, ours = _pair()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(lambda: Wire(ours, b"token", dialled=False, timeout_s=5))
        greeting = theirs.recv(4096)
        theirs.sendall(greeting[:-32] + bytes(32) + bytes(32))  # a nonce, and no proof
        with pytest.raises(WireError):
            end.result()
        assert theirs.recv(4096) == b""  # not even a proof of its own
    theirs.close()


def test_a_worker_of_another_version_is_told_of_once() -> None:
    told: list[str] = []
    pool = HostPool(
        HostsFile(listen="127.0.0.1:0", wait_s=1.0, hosts=(HostEntry(name="attic"),)),
        b"token",
        told.append,
    )
    for greeting in (b"GET / HTTP/1.1\r\n", *2 * [b"specexec hosts 1"]):
        with socket.create_connection(("127.0.0.1", pool.port)) as dialled:
            dialled.sendall(greeting + bytes(32))
            with suppress(ConnectionError):
                while dialled.recv(4096):
                    pass  # until the other end leaves
    pool.close()
    assert told == ["a worker of another version of specexec tried to join: start it with this one"]


def test_a_stranger_that_sends_a_byte_now_and_then_is_not_waited_for() -> None:
    theirs, ours = _pair()
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.1):
            theirs.send(b"s")

    trickling = threading.Thread(target=trickle)
    trickling.start()
    with pytest.raises(WireError, match=r"too long|timed out"):
        Wire(ours, b"token", dialled=False, timeout_s=0.5)
    ended.set()
    trickling.join()


# the length of the head, that of the body, their proof, the head, the body, the proof of all
@pytest.mark.parametrize("at", [0, 6, 20, 30, -18, -1])
def test_a_frame_that_was_changed_on_its_way_is_refused(at: int) -> None:
    other, tapped, sent = on_its_way({"kind": "pass"}, b"rows")
    sent[at] ^= 1
    tapped.own.sendall(bytes(sent) + bytes(64))
    with pytest.raises(WireError, match="changed"):
        other.receive(MOST, 2)


@pytest.mark.parametrize(("head", "body"), [(0, 1 << 40), (1 << 25, 0), (0, -1), (0, 1)])
def test_nothing_is_kept_of_a_frame_whose_length_was_changed_on_its_way(
    head: int, body: int
) -> None:
    """What pours in behind such lengths is not read."""
    other, tapped, sent = on_its_way({"kind": "pass"}, b"rows")
    sizes = struct.unpack("<IQ", sent[:12])
    sent[:12] = struct.pack("<IQ", sizes[0] + head, sizes[1] + body)
    pouring = threading.Thread(target=lambda: _pour(tapped.own, bytes(sent)))
    pouring.start()
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="changed"):
            other.receive(1 << 62, 5, 1 << 62)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        other.close()
        pouring.join()


def _pour(into: socket.socket, first: bytes) -> None:
    with suppress(OSError):
        into.sendall(first)
        for _ in range(128):
            into.sendall(bytes(1 << 16))


def test_a_frame_that_comes_twice_is_refused() -> None:
    other, tapped, sent = on_its_way({"kind": "pass"}, b"rows")
    tapped.own.sendall(bytes(sent) * 2)
    assert other.receive(MOST, 2)[0] == {"kind": "pass"}
    with pytest.raises(WireError, match="changed"):
        other.receive(MOST, 2)


@pytest.mark.parametrize("sent", [("x" * 90, b""), ("", bytes(65))])
def test_a_longer_frame_than_is_expected_is_not_waited_for(sent: tuple[str, bytes]) -> None:
    """Also of who knows the token: only its lengths have come, and their proof."""
    other, tapped, caught = on_its_way({"kind": sent[0]}, sent[1])
    tapped.own.sendall(caught[: 12 + 16])
    with pytest.raises(WireError, match=r"where 100 and 64 are the most"):
        other.receive(64, 5, 100)


@pytest.mark.parametrize("body", [0, 64])
def test_a_frame_as_long_as_is_expected_comes(body: int) -> None:
    one, other = ends(b"token", b"token")
    one.send({"kind": "rows"}, bytes(body))
    assert other.receive(body, 5, len('{"kind": "rows"}'))[1] == bytes(body)


@pytest.mark.parametrize("head", [[], 5, {}, {"kind": 1}, {"kind": None}, "pass"])
def test_a_frame_without_a_kind_is_refused(head: Any) -> None:
    one, other = ends(b"token", b"token")
    one.send(head)
    with pytest.raises(WireError, match="no kind"):
        other.receive(MOST, 5)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b'{"kind": "pass"} {}'])
def test_a_head_that_is_no_json_is_refused(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ends(b"token", b"token")
    with monkeypatch.context() as patched:
        patched.setattr("json.dumps", lambda head: mock.Mock(encode=lambda: text))
        one.send({})
    with pytest.raises(WireError, match="not JSON"):
        other.receive(MOST, 5)


def test_what_another_connection_carried_opens_no_new_one() -> None:
    """Recorded whole: the proof of the end that dialled, and a frame behind it."""
    dialled, accepted = _pair()
    recorded = bytearray()

    class Recorded:
        def sendall(self, data: bytes) -> None:
            recorded.extend(data)
            dialled.sendall(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(dialled, name)

    one, other = ends(b"token", b"token", (Recorded(), accepted))
    one.send({"kind": "hello"})
    assert other.receive(MOST, 5)[0] == {"kind": "hello"}
    theirs, ours = _pair()
    theirs.sendall(recorded)
    with pytest.raises(WireError, match="another token"):
        Wire(ours, b"token", dialled=False, timeout_s=5)
    theirs.settimeout(5)
    assert len(theirs.recv(4096)) == 16 + 32  # a greeting and random bytes: no proof
    assert theirs.recv(4096) == b""


def test_silence_ends_after_a_while() -> None:
    _, other = ends(b"token", b"token")
    with pytest.raises(WireError, match=r"nothing came for 0\.1 s"):
        other.receive(MOST, 0.1)


@pytest.mark.parametrize(
    ("text", "address"),
    [("attic", ("attic", PORT)), ("10.0.0.2:99", ("10.0.0.2", 99)), ("[::1]:5", ("::1", 5)),
     ("::1", ("::1", PORT)), ("[fe80::1]", ("fe80::1", PORT))],
)  # fmt: skip
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize(
    "text",
    ["", ":80", "host:", "host:x", "host:70000", "a..b", "x" * 64 + ":80", "host:" + "1" * 5000],
)
def test_what_is_no_address_gets_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        address_of(text)


def test_a_token_of_any_bytes_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    token = bytes(range(128, 160))  # as no text in UTF-8
    monkeypatch.setenv("SPECEXEC_TOKEN", os.fsdecode(token))
    assert token_of_environment() == token


def _same(ours: PassRows, theirs: PassRows) -> bool:
    arrays = ("tree_mask", "tree_positions", "parents")
    return (
        list(ours.tokens) == list(theirs.tokens)
        and list(ours.positions) == list(theirs.positions)
        and (ours.prefix_len, ours.pending) == (theirs.prefix_len, theirs.pending)
        and all(np.array_equal(getattr(ours, each), getattr(theirs, each)) for each in arrays)
    )


def _told(order: PassOrder) -> PassOrder:
    """The order as it arrives."""
    one, other = ends(b"token", b"token")
    one.send(order.head(), *body_of(order.hidden))
    return PassOrder.read(*other.receive(MOST, 5))


def test_a_pass_arrives_as_it_was_sent() -> None:
    texts = [
        (3, verification_rows(random_tokens(5), random_tree(13, 1), 7)),
        (8, PassRows.chain(random_tokens(4), 0)),
    ]
    hidden = torch.randn(1, 22, 6)
    done = [("commit", 3, 4, [6, 9]), ("crop", 8, 0), ("copy", 8, 3, 2), ("drop", 5)]
    found = _told(PassOrder(first=1, done=done, texts=texts, tuples=True, hidden=hidden))
    assert found.done == [("commit", 3, 4, 6, 9), ("crop", 8, 0), ("copy", 8, 3, 2), ("drop", 5)]
    assert found.tuples
    assert found.first == 1
    assert torch.equal(found.hidden, hidden)
    for (ours, rows), (theirs, told) in zip(texts, found.texts, strict=True):
        assert ours == theirs
        assert _same(rows, told)


def _none() -> dict:
    """A text without rows, as it is told."""
    order = PassOrder(first=1, done=[], texts=[(1, PassRows.chain([], 0))], tuples=False,
                      hidden=torch.zeros(1, 1, 1))  # fmt: skip
    return order.head()["texts"][0][1]


def _spoiled(change: Callable[[dict], object]) -> dict:
    rows = verification_rows(random_tokens(2), random_tree(4, 1), 3)
    order = PassOrder(first=1, done=[("crop", 1, 2)], texts=[(1, rows)], tuples=False,
                      hidden=torch.zeros(1, 6, 4))  # fmt: skip
    head = order.head()
    change(head)
    return head


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.pop("texts"),
        lambda head: head.update(first=[1]),
        lambda head: head["texts"][0][1]["tokens"].pop(),
        lambda head: head["texts"][0][1].update(seen="zz"),
        lambda head: head["texts"][0][1].update(seen=""),
        lambda head: head["texts"][0][1].update(pending=-1),
        lambda head: head["texts"][0][1].update(parents=[0.5] * 6),
        lambda head: head["texts"][0][1].update(parents=[2, 3, 4, 4, 4, 8]),
        lambda head: head["texts"][0][1].update(parents=[2, 3, 4, 4, 4, 3]),
        lambda head: head["texts"][0][1].update(parents=[1, 3, 4, 4, 4, 4]),
        lambda head: head.update(shape=[1, 7, 4]),
        lambda head: head.update(shape=[-1, -6, 4]),
        lambda head: head.update(shape=[6, 1, 4]),
        lambda head: head.update(shape=[1, 4, 6]),
        lambda head: head.update(shape=[1, 3, 2, 4]),
        lambda head: head.update(shape=["x", 1, 1]),
        lambda head: head.update(shape=5),
        lambda head: head.update(texts=[]),
        lambda head: head.update(texts=[[1, _none()]] * 2),
        lambda head: head["texts"][0][1].update(places=[1] * 5, seen="ffffff"),
        lambda head: head["texts"][0][1].update(prefix=1 << 64),
        lambda head: head.update(done=[["crop", "x"]]),
        lambda head: head.update(done=[[]]),
    ],
)
def test_an_order_that_is_none_is_refused(change: Callable[[dict], object]) -> None:
    with pytest.raises(WireError):
        PassOrder.read(_spoiled(change), bytearray(96))


def test_rows_of_another_size_than_told_are_refused() -> None:
    for shape in ([1, 2, 3], [1, 5], ["x", 1, 1], 5, None):
        with pytest.raises(WireError, match="no rows of shape"):
            stream_of({"shape": shape}, bytearray(20))
