"""`specexec serve` as a program: what it says, what it refuses, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
from cli_runner import run_cli

from specexec_cli.cli.serve import _names
from specexec_cli.planning import chosen_models
from specexec_cli.planning.request import Request

COMMAND = [sys.executable, "-m", "specexec_cli.cli.main", "serve", "demo", "--offline"]


@contextmanager
def program(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program and its address, once it answers."""
    running = subprocess.Popen(
        [*COMMAND, "--port", "0", *options], stderr=subprocess.PIPE, text=True
    )
    assert running.stderr is not None
    try:
        line = running.stderr.readline()
        assert line.startswith("demo at http://127.0.0.1:"), line + running.stderr.read()
        yield running, line.split()[2]
    finally:
        running.kill()
        running.wait()
        running.stderr.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_streams_and_the_program(number: signal.Signals, code: int) -> None:
    with program("--method", "autoregressive") as (running, url):
        body = {"prompt": "x", "max_tokens": 3000, "temperature": 2.0, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            running.send_signal(number)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert "shutting down" in rest[-4]
        _, errors = running.communicate(timeout=120)
        assert running.returncode == code
        assert errors == ""


def test_addresses_that_cannot_be_listened_on() -> None:
    with program("--method", "autoregressive") as (_, url):
        taken = run_cli("serve", "demo", "--port", url.rpartition(":")[2])
    assert taken.code == 2
    assert "is taken: choose another with --port" in taken.error
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        refused = run_cli("serve", "demo", "--host", host)
        assert refused.code == 2
        assert "set a key with --api-key" in refused.error
    elsewhere = run_cli("serve", "demo", "--host", "192.0.2.1", "--api-key", "k")
    assert elsewhere.code == 2
    assert "cannot listen on 192.0.2.1" in elsewhere.error


@pytest.mark.parametrize(
    ("model", "target", "names"),
    [("demo", "demo-target", ("demo", "demo-target")),
     ("org/name", "org/name", ("org/name", "name")), ("./a/b.gguf", "./a/b.gguf", ("b.gguf",))],
)  # fmt: skip
def test_a_model_answers_to_the_name_that_it_was_started_by(
    model: str, target: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = SimpleNamespace(name=model, target=SimpleNamespace(name=target))
    monkeypatch.setattr(chosen_models, "choose_pair", lambda registry, request: pair)
    assert _names(Request(model=model)) == names
