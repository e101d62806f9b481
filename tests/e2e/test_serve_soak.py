"""Clients that come, go and break off at random leave nothing behind, and disturb no text."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from serve_soak import soak
from serve_strangers import fuzz
from serving import served, wait_until_idle

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.session import Session, TextSession


def expected(session: TextSession, body: dict[str, object]) -> tuple[str, str]:
    sampling = SamplingConfig(temperature=body["temperature"], seed=body["seed"])  # type: ignore[arg-type]
    generation = GenerationConfig(max_tokens=body["max_tokens"], stop=tuple(body.get("stop", ())))  # type: ignore[arg-type]
    steps = list(session.generate(str(body["prompt"]), sampling=sampling, generation=generation))
    finish = "length" if steps[-1].finish_reason == "length" else "stop"
    return "".join(step.text for step in steps), finish


def test_a_few_dozen_clients_at_once() -> None:
    with Session.open(model="demo", offline=True) as session:
        # threads that the kernels keep come with the first text
        expected(session, {"prompt": "x", "max_tokens": 8, "temperature": 0.0, "seed": 0})
        before = threading.active_count()
        with served(session, most_waiting=200) as server:
            outcome = asyncio.run(soak(server.url, 36, at_once=12, seed=1))
            wait_until_idle(server.url, timeout_s=60)
            figures = server.service.engine.figures()
        ends = time.monotonic() + 15  # idle workers of pools leave by themselves
        while threading.active_count() > before and time.monotonic() < ends:
            time.sleep(0.05)
        assert threading.active_count() <= before, threading.enumerate()
        assert len(outcome.kinds) == 6, "each kind has come"
        assert set(outcome.statuses) <= {200, 400}
        assert len(outcome.finished) > 10
        assert figures.texts["cancelled"] > 0
        assert figures.texts.get("failed", 0) == 0
        for one in outcome.finished:
            assert (one.text, one.finish) == expected(session, one.body)


def test_requests_made_from_the_servers_own_schema(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        Session.open(model="demo", method="autoregressive", offline=True) as session,
        served(session) as server,
    ):
        told, _ = asyncio.run(fuzz(server.url, 200, seed=2))
        wait_until_idle(server.url, timeout_s=60)
    assert told["200"] > 20
    assert told["400"] > 20
    assert told["left"] > 5
    assert capfd.readouterr().err == ""
