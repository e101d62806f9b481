"""Who may ask a server: hosts, origins, keys and sizes; through the routes, without a network."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serving import always_open

from specexec_cli.engine.text import EngineFigures
from specexec_cli.errors import ConfigError
from specexec_cli.serve.app import create_app
from specexec_cli.serve.guards import Access, is_loopback
from specexec_cli.serve.reading import MOST_BODY_BYTES

KEY = "a key of some length"


class Idle:
    """An engine with nothing to do."""

    def figures(self) -> EngineFigures:
        return EngineFigures(
            slots=1, running=0, waiting=0, most_waiting=4, passes=0, generated_tokens=0,
            bytes_streamed=0, texts={},
        )  # fmt: skip


def ask(access: Access, method: str, path: str, headers: dict[str, str], **more: Any):
    service: Any = SimpleNamespace(
        engine=Idle(), closing=False, model="toy", context_length=64, layers=2, draft=None, facts={}
    )

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(
            create_app(always_open(service), access), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, headers=headers, **more)

    return asyncio.run(asked())


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "[::1]:8000"])
def test_names_of_this_machine(host: str) -> None:
    assert ask(Access(host="127.0.0.1"), "GET", "/v1/models", {"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "[", "10.0.0.1:8000"]
)
def test_other_names_are_refused_on_loopback(host: str) -> None:
    for path in ("/", "/v1/models", "/health", "/page/app.js", "/nowhere"):
        found = ask(Access(host="127.0.0.1"), "GET", path, {"Host": host})
        assert code_of(found) == (403, "wrong_host")


def test_elsewhere_any_name_will_do_but_not_without_the_key() -> None:
    access = Access(host="0.0.0.0", api_key=KEY)
    for given in (None, "Bearer wrong", KEY, f"Basic {KEY}", "Bearer ümlaut"):
        raw: Any = {} if given is None else {"Authorization": given.encode()}
        for path in ("/v1/models", "/metrics", "/v1/completions", "/nowhere"):
            found = ask(access, "GET", path, {"Host": "box.lan", **raw})
            assert code_of(found) == (401, "invalid_api_key")
    right = {"Host": "box.lan", "Authorization": f"Bearer {KEY}"}
    assert ask(access, "GET", "/v1/models", right).status_code == 200
    # the page itself holds nothing, and asks for the key
    assert ask(access, "GET", "/", {"Host": "box.lan"}).status_code == 200
    assert ask(access, "GET", "/health", {"Host": "box.lan"}).status_code == 200


def test_pages_of_other_origins_are_refused_unless_named() -> None:
    access = Access(host="127.0.0.1", origins=("https://chat.example",))
    host = {"Host": "127.0.0.1:8000"}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:9000", "http://["):
        found = ask(access, "GET", "/v1/models", {**host, "Origin": origin})
        assert code_of(found) == (403, "wrong_origin")
        assert "access-control-allow-origin" not in found.headers
    own = ask(access, "GET", "/v1/models", {**host, "Origin": "http://127.0.0.1:8000"})
    assert own.status_code == 200
    named = ask(access, "GET", "/v1/models", {**host, "Origin": "https://chat.example"})
    assert named.headers["access-control-allow-origin"] == "https://chat.example"
    closed = ask(Access(host="127.0.0.1"), "GET", "/v1/models", {**host})
    assert "access-control-allow-origin" not in closed.headers
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    assert ask(access, "OPTIONS", "/v1/completions", {**host, **asked}).status_code == 200


@pytest.mark.parametrize("named", ["https://chat.example/", "https://Chat.Example"])
def test_origins_are_kept_as_browsers_write_them(named: str) -> None:
    access = Access(host="127.0.0.1", origins=(named,))
    page = {"Host": "127.0.0.1:8000", "Origin": "https://chat.example"}
    found = ask(access, "GET", "/v1/models", page)
    assert found.status_code == 200
    assert found.headers["access-control-allow-origin"] == "https://chat.example"
    # the openai client in a browser has headers of its own
    wanted = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    asked = ask(access, "OPTIONS", "/v1/chat/completions", {**page, **wanted})
    assert asked.status_code == 200
    assert "x-stainless-os" in asked.headers["access-control-allow-headers"]


@pytest.mark.parametrize(
    "named", ["*", "", "null", "chat.example", "https://*.example", "https://a.example/page"]
)
def test_origins_that_no_page_has_are_refused(named: str) -> None:
    with pytest.raises(ConfigError, match=r"`cors_origin` .* is no page's origin"):
        Access(host="127.0.0.1", origins=(named,))
    Access(host="127.0.0.1", origins=("app://obsidian.md", "http://[::1]:3000", "HTTP://box.lan/"))


@pytest.mark.parametrize("key", ["schlüssel", "key ", " key", "key\n", "a\tb", " "])
def test_keys_that_no_request_can_bring_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="`api_key`"):
        Access(host="127.0.0.1", api_key=key)


def test_a_form_of_another_page_cannot_send_a_request() -> None:
    """Browsers send text/plain elsewhere without asking whether they may."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        found = ask(
            Access(host="127.0.0.1"), "POST", "/v1/completions", {"Content-Type": kind},
            content=json.dumps({"prompt": "x"}),
        )  # fmt: skip
        assert code_of(found) == (415, "not_json")


def test_bodies_have_a_limit() -> None:
    found = ask(
        Access(host="127.0.0.1"), "POST", "/v1/completions", {"Content-Type": "application/json"},
        content=b" " * (MOST_BODY_BYTES + 1),
    )  # fmt: skip
    assert code_of(found) == (413, "too_large")


@pytest.mark.parametrize(
    "path",
    ["/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/%2e%2e/models.toml", "/page//etc/passwd",
     "/page/app.js%00", "/models.toml"],
)  # fmt: skip
def test_no_other_file_is_sent(path: str) -> None:
    found = ask(Access(host="127.0.0.1"), "GET", path, {})
    assert found.status_code == 404
    assert "error" in found.json()


def test_the_page_may_fetch_nothing_from_elsewhere() -> None:
    found = ask(Access(host="127.0.0.1"), "GET", "/", {})
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "<script>" not in found.text
    assert " on" not in found.text.partition("<body>")[2].replace(" one", "").replace(" only", "")


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("::1", True),
     ("0.0.0.0", False), ("::", False), ("192.168.1.5", False), ("box.lan", False), ("", False)],
)  # fmt: skip
def test_loopback(host: str, own: bool) -> None:
    assert is_loopback(host) is own
