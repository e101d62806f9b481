"""Texts of a server that end early: the client left, the queue is full, a failure, a signal."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import openai
import pytest
from serving import Served, is_idle, served, wait_until_idle

import specexec_cli
from specexec_cli.engine.batched import Batched
from specexec_cli.errors import StreamError
from specexec_cli.session import Session, TextSession


@pytest.fixture(scope="module")
def session() -> Iterator[TextSession]:
    with Session.open(model="demo", offline=True) as session:
        yield session


@pytest.fixture(scope="module")
def server(session: TextSession) -> Iterator[Served]:
    with served(session) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with closing(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)) as it:
        yield it


@pytest.mark.parametrize("streamed", [True, False])
def test_whoever_goes_away_ends_the_text(server: Served, streamed: bool) -> None:
    wait_until_idle(server.url)
    # under this seed hundreds of tokens come before the text would end by itself
    sampling = {"temperature": 2.0, "seed": 1}
    body = {"prompt": "x", "max_tokens": 3000, "stream": streamed, **sampling}
    before = server.service.engine.figures()
    if streamed:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
    wait_until_idle(server.url)
    after = server.service.engine.figures()
    assert after.texts["cancelled"] == before.texts.get("cancelled", 0) + 1
    assert after.generated_tokens - before.generated_tokens < 1000


def test_a_full_queue_is_429_and_a_place_is_given_back(session: TextSession) -> None:
    with (
        served(session, slots=1, most_waiting=1) as server,
        closing(openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)) as client,
    ):
        asked = {"model": "demo", "prompt": "x", "temperature": 2.0}
        first = client.completions.create(**asked, max_tokens=3000, stream=True)
        next(iter(first))
        second = client.completions.create(**asked, max_tokens=2, stream=True)
        # its headers come at once, and its text when the first one has ended
        with pytest.raises(openai.RateLimitError, match="waiting already") as told:
            client.completions.create(**asked)
        assert told.value.code == "queue_full"
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**asked, n=2)
        first.close()
        assert list(second)[-1].choices[0].finish_reason in ("length", "stop")
        wait_until_idle(server.url)


def test_a_failed_pass_is_a_500_and_the_next_text_works(
    client: openai.OpenAI, server: Served, session: TextSession
) -> None:
    asked = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 8}
    expected = client.completions.create(**asked).choices[0].text
    wait_until_idle(server.url)
    model = session.target.model  # type: ignore[attr-defined]

    def unreadable(layer: int) -> None:
        raise StreamError("the disk does not answer")

    usual, model.on_layer = model.on_layer, unreadable
    with pytest.raises(openai.InternalServerError, match="the disk does not answer"):
        client.completions.create(**asked)
    stream = client.completions.create(**asked, stream=True)
    with pytest.raises(openai.APIError, match="the disk does not answer"):
        list(stream)
    model.on_layer = usual
    assert client.completions.create(**asked).choices[0].text == expected


def test_an_engine_that_has_ended_by_a_bug_says_so(
    session: TextSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dying(self: Batched) -> None:
        raise KeyError("a bug")

    with served(session) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        monkeypatch.setattr(Batched, "_admit", dying)
        for reason in ("an error of specexec itself: its log", "start the server again"):
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 500
            assert reason in answer.json()["error"]["message"]
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
    assert "KeyError" in capsys.readouterr().err


@pytest.mark.parametrize("slots", [1, 3])
def test_the_end_of_the_server_ends_streams(session: TextSession, slots: int) -> None:
    told: list[str] = []
    with served(session, slots=slots) as server:

        def read() -> None:
            body = {"prompt": "x", "max_tokens": 3000, "temperature": 2.0, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                told.extend(response.iter_lines())

        reader = threading.Thread(target=read)
        reader.start()
        while is_idle(server.url):
            time.sleep(0.01)
        server.server.stop()
        reader.join(30)
        assert not reader.is_alive()
    assert told[-2:] == ["data: [DONE]", ""]
    assert "shutting down" in told[-4]


@pytest.mark.parametrize("slots", [1, 3])
def test_a_file_that_cannot_be_read_and_is_back(
    tmp_path: Path, slots: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The weights are cut off under a running server, and put back."""
    demo = Path(specexec_cli.__file__).parent / "demo"
    folder = tmp_path / "some one's models"
    shutil.copytree(demo, folder)
    folders = {"model": str(folder / "target"), "draft": str(folder / "draft")}
    weights = folder / "target" / "model.safetensors"
    whole, stamp = weights.read_bytes(), weights.stat().st_mtime_ns
    with (
        Session.open(**folders, offload="ssd", offline=True) as session,
        served(session, slots=slots) as server,
        closing(openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)) as client,
    ):
        asked = {"model": "target", "prompt": "def add(a, b):", "max_tokens": 24}
        expected = client.completions.create(**asked).choices[0].text
        assert httpx.get(f"{server.url}/health").status_code == 200
        os.truncate(weights, len(whole) // 4)
        with pytest.raises(openai.InternalServerError, match=re.escape(weights.name)) as told:
            client.completions.create(**asked, seed=1)
        assert told.value.code == "StreamError"
        stream = client.completions.create(**asked, stream=True)
        with pytest.raises(openai.APIError, match=re.escape(weights.name)) as streamed:
            list(stream)
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "failing")
        assert weights.name in health.json()["reason"]
        models = httpx.get(f"{server.url}/v1/models").text
        for answer in (str(told.value), str(streamed.value), health.text, models):
            assert not any(part in answer for part in ("some", "one's", str(tmp_path))), answer
        assert str(weights) in capfd.readouterr().err, "the log says where"
        weights.write_bytes(whole)
        os.utime(weights, ns=(stamp, stamp))  # another file in its place would be refused
        assert client.completions.create(**asked).choices[0].text == expected
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
        assert server.service.engine.figures().texts["failed"] == 2
