"""A small hub on the loopback: metadata, gated repositories, and downloads that crawl or break off.

It answers what huggingface_hub asks: revision, tree, auth-check, and files with ranges.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import _tree_cache, close_session, constants

TOKEN = "accepted"
_PIECE = 1 << 14


def oid(name: str, data: bytes) -> str:
    """What the hub calls a file's content: weights lie outside of git, by their SHA-256."""
    return (hashlib.sha256 if _is_large(name) else hashlib.sha1)(data).hexdigest()


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf"))


def _outside_git(name: str, data: bytes, key: str) -> dict[str, Any]:
    """Metadata that weights have and other files lack; what the hash is called differs."""
    if not _is_large(name):
        return {}
    return {"lfs": {key: oid(name, data), "size": len(data), "pointerSize": 134}}


@dataclass
class FakeHub:
    """Repositories by id, and how the hub behaves.

    Args:
        repos: files by name.
        gated: repositories that want the licence accepted, which TOKEN has.
        bytes_per_s: of each download; None is as fast as it goes.
        breaks: how many downloads of a file break off in their middle.
        ranges: whether it heeds them; else every answer is the whole file.
        lies: what stands in metadata in the place of what is right.
    """

    repos: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    bytes_per_s: float | None = None
    breaks: dict[str, int] = field(default_factory=dict)
    ranges: bool = True
    lies: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str, int]] = field(default_factory=list)  # (method, path, range begin)
    sent: dict[str, int] = field(default_factory=dict)  # body bytes by file
    url: str = ""

    def sha(self, repo: str) -> str:
        return hashlib.sha1(repo.encode()).hexdigest()

    def told(self, text: str) -> str:
        """Metadata as it is sent."""
        for right, wrong in self.lies.items():
            text = text.replace(right, wrong)
        return text

    def downloads(self) -> list[str]:
        """Names of the files whose bodies were asked for."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked
                if method == "GET" and "/resolve/" in path]  # fmt: skip


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """Serves until the block ends."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        begin = int(re.sub(r"\D", "", self.headers.get("Range", "0").partition("-")[0]) or 0)
        self.hub.asked.append((self.command, path, begin))
        repo = next((name for name in self.hub.repos if f"/{name}/" in path + "/"), None)
        if repo is None:
            return self._json(404, {}, body, {"X-Error-Code": "RepoNotFound"})
        rest = (path + "/").partition(f"/{repo}/")[2].rstrip("/")
        closed = repo in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}"
        if closed and (rest == "auth-check" or rest.startswith("resolve/")):
            return self._json(403, {}, body, {"X-Error-Code": "GatedRepo"})
        if rest == "auth-check":
            return self._json(200, {}, body)
        files, sha = self.hub.repos[repo], self.hub.sha(repo)
        if rest in ("", "revision/main", f"revision/{sha}"):
            return self._json(200, {
                "id": repo, "sha": sha, "gated": "manual" if repo in self.hub.gated else False,
                "siblings": [
                    {"rfilename": n, "size": len(d), **_outside_git(n, d, "sha256")}
                    for n, d in files.items()
                ],
            }, body)  # fmt: skip
        if rest.startswith("revision/"):
            return self._json(404, {}, body, {"X-Error-Code": "RevisionNotFound"})
        if rest.startswith("tree/"):
            return self._json(200, [
                {"type": "file", "path": n, "size": len(d), "oid": oid(n, d),
                 **_outside_git(n, d, "oid")}
                for n, d in files.items()
            ], body)  # fmt: skip
        name = rest.removeprefix(f"resolve/{sha}/").removeprefix("resolve/main/")
        if name not in files:
            return self._json(404, {}, body, {"X-Error-Code": "EntryNotFound"})
        self._file(name, files[name], sha, begin, body)

    def _json(
        self, status: int, content: Any, body: bool, headers: Mapping[str, str] | None = None
    ) -> None:
        data = self.hub.told(json.dumps(content)).encode()
        self._head(status, len(data), {"Content-Type": "application/json", **(headers or {})})
        if body:
            self.wfile.write(data)

    def _head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, self.hub.told(value))
        self.end_headers()

    def _file(self, name: str, data: bytes, sha: str, begin: int, body: bool) -> None:
        begin *= self.hub.ranges
        part, status = data[begin:], 206 if begin else 200
        headers = {"ETag": f'"{oid(name, data)}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._head(status, len(part), headers)
        if body:
            self._body(name, part)

    def _body(self, name: str, part: bytes) -> None:
        breaks = self.hub.breaks.get(name, 0) > 0
        if breaks:
            self.hub.breaks[name] -= 1
            part = part[: len(part) * 3 // 4]
        for start in range(0, len(part), _PIECE):
            piece = part[start : start + _PIECE]
            try:
                self.wfile.write(piece)
            except (BrokenPipeError, ConnectionResetError):  # whoever asked has gone
                break
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(piece)
            if self.hub.bytes_per_s:
                time.sleep(len(piece) / self.hub.bytes_per_s)
        if breaks:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)


def asked_instead(hub: FakeHub, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """This process asks the hub, and keeps in `cache` what comes; nothing is remembered of before.

    Args:
        patch: undoes it.
    """
    url = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    for owner, name, value in (
        (constants, "ENDPOINT", hub.url),
        (constants, "HUGGINGFACE_CO_URL_TEMPLATE", url),
        (constants, "HF_HUB_CACHE", str(cache)),
        (_tree_cache, "_IN_MEMORY_TREE_CACHE", {}),
    ):
        patch.setattr(owner, name, value)
    close_session()
