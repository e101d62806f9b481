"""Several models by name, one of them in memory at a time, and none while nobody asks."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from cli_runner import run_cli
from serving import Served, running, wait_until_idle

from specexec_cli.config import SamplingConfig
from specexec_cli.engine.factory import open_engine
from specexec_cli.errors import CheckpointError
from specexec_cli.serve.guards import Access
from specexec_cli.serve.models import Models, Offered
from specexec_cli.serve.run import Server
from specexec_cli.serve.service import Defaults, Service
from specexec_cli.session import Session


class Opener:
    """Opens models, and notes which, and what became of their sessions."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.sessions: list[weakref.ref[Any]] = []
        self.broken = False

    def offered(self, name: str, method: Any) -> Offered:
        def opened() -> Service:
            if self.broken:
                raise CheckpointError(f"/secret/folder/{name} has gone")
            gc.collect()
            assert all(ref() is None for ref in self.sessions), "one at a time is in memory"
            session = Session.open(model="demo", method=method, offline=True)
            self.opened.append(name)
            self.sessions.append(weakref.ref(session))
            engine = open_engine(session, slots=2, most_waiting=3)
            service = Service(session, engine, Defaults(sampling=SamplingConfig(), max_tokens=8))
            service.model = name
            return service

        return Offered(names=(name, f"{name}-target"), open=opened)


@contextmanager
def served(opener: Opener, unload_s: float | None = None) -> Iterator[Served]:
    offered = [opener.offered("one", "specexec"), opener.offered("two", "autoregressive")]
    models = Models(offered, offered[0].open(), unload_s)
    try:
        server = Server(models, Access(host="127.0.0.1"))
        with running(server) as url:
            yield Served(url, None, server, models)  # type: ignore[arg-type]
    finally:
        models.close()


def ask(server: Served, model: str | None, **more: Any) -> httpx.Response:
    body = {"prompt": "def add(a, b):", "max_tokens": 8, **more}
    if model is not None:
        body["model"] = model
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def test_a_request_exchanges_the_model_once_running_texts_have_ended() -> None:
    opener = Opener()
    with served(opener) as server, ThreadPoolExecutor(8) as pool:
        assert [one["id"] for one in httpx.get(f"{server.url}/v1/models").json()["data"]] == [
            "one", "two",
        ]  # fmt: skip
        text = ask(server, "one").json()["choices"][0]["text"]
        long = {"prompt": "x", "max_tokens": 400, "temperature": 2.0, "seed": 1}
        # one that runs, one that wants the other model, and one that came behind it
        first = pool.submit(ask, server, "one", **long)
        wait_until_running(server.url)
        other = pool.submit(ask, server, "two-target")
        while not server.models._waiting:
            time.sleep(0.01)
        behind = [pool.submit(ask, server, name) for name in ("one", "one-target", "two")]
        assert first.result().json()["usage"]["completion_tokens"] > 20
        assert other.result().json()["model"] == "two"
        found = [each.result().json() for each in behind]
        assert sorted(one["model"] for one in found) == ["one", "one", "two"]
        assert {one["choices"][0]["text"] for one in (*found, other.result().json())} == {text}
        assert opener.opened[:2] == ["one", "two"]
        assert len(opener.opened) <= 5
        # what is not on the list is not opened, whatever there is on this machine
        for name in ("demo", "/etc/passwd", "three"):
            refused = ask(server, name)
            assert refused.status_code == 404
            assert "this server has 'one', 'two'" in refused.json()["error"]["message"]
        page = httpx.get(f"{server.url}/metrics").text
        assert 'specexec_texts_total{finish="length"}' in page


def wait_until_running(url: str) -> None:
    while not httpx.get(f"{url}/health").json()["running"]:
        time.sleep(0.01)


def test_an_idle_model_leaves_memory_and_comes_back() -> None:
    opener = Opener()
    with served(opener, unload_s=0.2) as server:
        ask(server, "two")
        wait_until_idle(server.url)
        before = httpx.get(f"{server.url}/metrics").text
        ends = time.monotonic() + 30
        while server.models.service is not None:
            assert time.monotonic() < ends
            time.sleep(0.05)
        facts = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [one["specexec"]["open"] for one in facts] == [False, False]
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
        assert counted(httpx.get(f"{server.url}/metrics").text) == counted(before)
        assert ask(server, None).json()["model"] == "two", "the one that was open last"
        assert opener.opened == ["one", "two", "two"]


def counted(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("specexec_generated_tokens_t")]


def test_a_model_that_cannot_be_opened_is_an_answer_and_the_next_request_tries_again() -> None:
    opener = Opener()
    with served(opener) as server:
        opener.broken = True
        failed = ask(server, "two")
        assert failed.status_code == 500
        assert failed.json()["error"]["message"] == "two has gone"
        opener.broken = False
        assert ask(server, None).json()["model"] == "one", "the one that was open last"


def test_a_client_that_left_has_no_model_exchanged() -> None:
    opener = Opener()
    with served(opener) as server, ThreadPoolExecutor(2) as pool:
        long = {"prompt": "x", "max_tokens": 300, "temperature": 2.0, "seed": 1}
        first = pool.submit(ask, server, "one", **long)
        wait_until_running(server.url)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "model": "two"},
                       timeout=0.3)  # fmt: skip
        assert first.result().status_code == 200
        assert ask(server, "one").status_code == 200
        assert opener.opened == ["one"]


def test_the_server_ends_while_a_request_waits_for_its_model() -> None:
    opener = Opener()
    with served(opener) as server, ThreadPoolExecutor(2) as pool:
        long = {"prompt": "x", "max_tokens": 3000, "temperature": 2.0, "seed": 1}
        pool.submit(ask, server, "one", **long)
        wait_until_running(server.url)
        other = pool.submit(ask, server, "two")
        while not server.models._waiting:
            time.sleep(0.01)
        threading.Thread(target=server.models.stop).start()
        assert other.result().status_code == 503
        assert opener.opened == ["one"]


def test_what_is_for_one_model_is_refused_for_several() -> None:
    for option in ("--draft", "--revision", "--hosts"):
        refused = run_cli("serve", "demo", "demo-target", option, "demo-draft", "--offline")
        assert refused.code == 2
        assert f"{option} is for one model, and several are named" in refused.error
    twice = run_cli("serve", "demo", "demo", "--offline", "--port", "0")
    assert twice.code == 2
    assert "two of the models are called 'demo'" in twice.error
