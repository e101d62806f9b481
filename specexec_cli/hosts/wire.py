"""Frames over one TCP connection between two machines that know the same token.

    hello:  both send 32 random bytes; the one that dialled proves the token first, then the other.
    frame:  length of the head, length of the body | 16 bytes that prove them
            JSON head | body | 16 bytes that prove all of it

Whoever cannot prove the token has learned nothing but the random bytes. Every frame is proved by a
key of this connection alone and its number, so that none can be added, changed, repeated or left
out on the way. Its lengths are proved before anything of it is kept, and are no more than the end
that receives expects, so that nobody without the token can have it fill its memory. Frames are not
encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from specexec_cli.errors import ConfigError
from specexec_cli.guarded import parse_json

LEAST_TOKEN = 16  # characters
TOKEN_VARIABLE = "SPECEXEC_TOKEN"
_NAME = b"specexec hosts "
_GREETING = _NAME + b"2"
_NONCE, _PROOF, _TAG = 32, 32, 16  # bytes
_SIZES = struct.Struct("<IQ")
_MOST_HEAD = 64 << 20  # bytes of an order's: of a prompt of a million tokens 30 MB
_PART = 1 << 18  # bytes at once, so that memory is taken only for what came
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}

Part = bytes | bytearray | memoryview  # of a body


class WireError(Exception):
    """The connection ended, or sent what is no frame; its text says which."""


class OtherVersionError(WireError):
    """The other end is a specexec of another version, as it says without any proof."""


def token_of_environment() -> bytes:
    """The token that machines prove to each other.

    Raises:
        ConfigError: there is none, or it is short enough to be guessed.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < LEAST_TOKEN:
        what = f"has {len(token)} characters" if token else "is not set"
        raise ConfigError(
            f"{TOKEN_VARIABLE} {what}: every machine needs the same token of {LEAST_TOKEN} "
            "characters or more, as `openssl rand -hex 16` prints one"
        )
    return os.fsencode(token)


class Wire:
    """One connection, once both ends have proved that they know the token.

    Any thread may send, one at a time; one thread receives.

    Args:
        connected: the connection.
        token: that both ends know.
        dialled: whether this end did.
        timeout_s: for the proofs, all together.
    Raises:
        WireError: the other end does not know the token, or is no specexec.
    """

    def __init__(
        self, connected: socket.socket, token: bytes, *, dialled: bool, timeout_s: float = 10.0
    ) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self._part = memoryview(bytearray(_PART))
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):  # not on every system
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            connected.settimeout(timeout_s)
            self._prove(token, dialled, time.monotonic() + timeout_s)
            connected.settimeout(None)
        except OSError as error:
            self.close()
            raise WireError(f"the connection failed: {error.strerror or error}") from error
        except WireError:
            self.close()
            raise

    def _prove(self, token: bytes, dialled: bool, deadline: float) -> None:
        ours = os.urandom(_NONCE)
        self._socket.sendall(_GREETING + ours)
        greeting = bytes(self._exactly(len(_GREETING), deadline=deadline))
        if greeting != _GREETING:
            if greeting.startswith(_NAME):
                raise OtherVersionError("the other end is a specexec of another version")
            raise WireError("the other end is no specexec")
        theirs = bytes(self._exactly(_NONCE, deadline=deadline))
        both = ours + theirs if dialled else theirs + ours

        def proof(what: bytes) -> bytes:
            return hmac.digest(token, what + both, "sha256")

        own, other = (b"joins", b"accepts") if dialled else (b"accepts", b"joins")
        if dialled:
            self._socket.sendall(proof(own))
        try:
            shown = self._exactly(_PROOF, deadline=deadline)
            proved = hmac.compare_digest(shown, proof(other))
        except WireError:
            proved = False  # it left instead: our own proof was wrong
        if not proved:
            raise WireError(f"the other end has another token: check {TOKEN_VARIABLE} on both")
        if not dialled:
            self._socket.sendall(proof(own))
        self._keys = proof(b"frames of " + own), proof(b"frames of " + other)
        self._counts = [0, 0]  # frames sent and received

    def send(self, head: Mapping[str, Any], *body: Part) -> None:
        """Sends a frame.

        Args:
            body: its parts, one behind another.
        Raises:
            WireError: the connection ended.
        """
        text = json.dumps(head).encode()
        sizes = _SIZES.pack(len(text), sum(map(len, body)))
        with self._sending:
            told = self._proof_of_next(0)
            told.update(sizes)
            front = sizes + told.digest() + text
            told.update(text)
            try:
                self._socket.sendall(front)
                for part in body:
                    with memoryview(part) as whole:
                        for at in range(0, len(whole), _PART):  # hashed while the link is busy
                            self._socket.sendall(whole[at : at + _PART])
                            told.update(whole[at : at + _PART])
                self._socket.sendall(told.digest())
            except OSError as error:
                raise WireError(f"the connection ended: {error.strerror or error}") from error

    def receive(
        self, most_body: int, timeout_s: float | None = None, most_head: int = _MOST_HEAD
    ) -> tuple[dict[str, Any], bytearray]:
        """The next frame's head and body.

        Args:
            most_body: bytes that the body may have, and `most_head` the head: what is said to be
                longer is not waited for.
            timeout_s: the longest silence; None waits for ever.
        Raises:
            WireError: the connection ended, was silent for too long, or sent what is no frame.
        """
        try:
            self._socket.settimeout(timeout_s)
            told = self._proof_of_next(1)
            sizes = self._exactly(_SIZES.size, told)
            self._check(self._exactly(_TAG), told)
            head_bytes, body_bytes = _SIZES.unpack(sizes)
            if head_bytes > most_head or body_bytes > most_body:
                raise WireError(
                    f"a frame of {head_bytes} and {body_bytes} bytes came, where {most_head} and "
                    f"{most_body} are the most"
                )
            text, body = self._exactly(head_bytes, told), self._exactly(body_bytes, told)
            self._check(self._exactly(_TAG), told)
        except TimeoutError as error:
            raise WireError(f"nothing came for {timeout_s:g} s") from error
        except OSError as error:
            raise WireError(f"the connection ended: {error.strerror or error}") from error
        try:
            head = parse_json(bytes(text))
        except ValueError as error:
            raise WireError(f"a frame's head is not JSON: {error}") from error
        if not isinstance(head, dict) or not isinstance(head.get("kind"), str):
            raise WireError("a frame has no kind")
        return head, body

    def close(self) -> None:
        """Ends the connection, and whatever waits on it. May be called again."""
        with suppress(OSError):  # it ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @staticmethod
    def _check(shown: bytearray, told: hashlib.blake2b) -> None:
        if not hmac.compare_digest(shown, told.digest()):
            raise WireError("a frame was changed on its way")

    def _proof_of_next(self, way: int) -> hashlib.blake2b:
        """What proves the next frame, once it has seen all of it: of those sent 0, received 1."""
        number = self._counts[way].to_bytes(8, "little")
        self._counts[way] += 1
        return hashlib.blake2b(number, key=self._keys[way], digest_size=_TAG)

    def _exactly(
        self, count: int, told: hashlib.blake2b | None = None, deadline: float | None = None
    ) -> bytearray:
        """The next `count` bytes of the connection.

        Args:
            told: is told of them as they come.
            deadline: by which all must be there; None bounds only each silence.
        Raises:
            WireError: it ended before.
            OSError: it failed, or was silent for too long.
        """
        found = bytearray()
        while len(found) < count:
            if deadline is not None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("the proof took too long")
                self._socket.settimeout(left_s)
            part = self._part[: count - len(found)]
            got = self._socket.recv_into(part)
            if not got:
                raise WireError("the connection ended")
            if told is not None:
                told.update(part[:got])
            found += part[:got]
        return found
