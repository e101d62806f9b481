"""Workers that are killed, or hang, at every point of their work: no text loses a token."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hosts_rig import TOKEN, WorkerProcess, free_port, in_waves_of_64, until

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.engine.batched import Batched
from specexec_cli.engine.text import TextRequest
from specexec_cli.hosts import joined
from specexec_cli.planning.hosts import WaveTimes
from specexec_cli.session import Session

_PROMPTS = [
    "".join(f"def {verb}_{name}(path):\n    return open(path)\n" for name in "abcdefghijkl")
    + f"def {verb}_lines(path):\n    with"
    for verb in ("read", "load", "see")
]
_WORKER = "specexec_cli.hosts.worker:"
# where a worker is, in the order of its work; a call's number, in front of or behind which
_BEFORE_IT_JOINS = ["specexec_cli.hosts.files:_sha256 1", "specexec_cli.hosts.wire:Wire._prove 1"]
_WHILE_IT_OPENS = [
    "specexec_cli.hosts.wire:Wire._prove behind 1",  # the first machine waits for what it tells
    _WORKER + "Session._answer 1",  # while its link is timed
    _WORKER + "Session._answer 4",
    _WORKER + "digest_of 1",
    _WORKER + "ModelSpec.open 1",
    _WORKER + "ModelSpec.open behind 1",
]
_IN_WAVES = [
    _WORKER + "OpenSpan.run 1",
    _WORKER + "OpenSpan.run behind 2",  # whose rows are not sent back
    _WORKER + "OpenSpan.run 4",
    _WORKER + "body_of behind 9",  # with trees, behind the prompts
]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECEXEC_TOKEN", TOKEN)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where no hash is kept yet
    monkeypatch.setattr(joined, "SILENCE_S", 5.0)
    monkeypatch.setattr(WaveTimes, "fastest", lambda times, texts: in_waves_of_64(texts))


def texts(hosts: Path | None = None, notice: Callable[[str], None] = print) -> list[list[int]]:
    """What a session writes behind all prompts at once."""
    with closing(
        Session.open(
            model="demo", dtype="float32", hosts=hosts, slots=3, cache=False, notice=notice
        )
    ) as session:
        requests = [
            TextRequest(
                prompt=tuple(session.encode(prompt)), sampling=SamplingConfig(),
                generation=GenerationConfig(max_tokens=24),
            )
            for prompt in _PROMPTS
        ]  # fmt: skip
        engine = Batched(session, slots=3, most_waiting=0)
        with closing(engine):
            running = [engine.submit(request) for request in requests]
            return [[token for step in each for token in step.tokens] for each in running]


@contextmanager
def workers_that_stop(
    points: Sequence[str], port: int, how: signal.Signals, lost: Callable[[], int]
) -> Iterator[list[str]]:
    """Workers one after another, each stopped at its point, and one that works on behind them.

    Args:
        lost: how many workers the first machine has told to be lost.
    Yields:
        the points at which one was stopped, so far.
    """
    stopped, started = list[str](), list[WorkerProcess]()

    def walk() -> None:
        for point in points:
            before = lost()
            code = f"import worker_points; worker_points.stand_at({point!r})"
            started.append(WorkerProcess("demo", port, "host-0", first=code))
            started[-1].until_it_says(f"stands at {point}", 300)
            started[-1].process.send_signal(how)
            if how is signal.SIGSTOP and point not in _BEFORE_IT_JOINS + _WHILE_IT_OPENS[:1]:
                until(lambda before=before: lost() > before, 300)
            stopped.append(point)
        started.append(WorkerProcess("demo", port, "host-0"))

    walking = threading.Thread(target=walk, daemon=True)
    walking.start()
    try:
        yield stopped
    finally:
        walking.join(300)
        for each in started:
            each.__exit__()


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The texts of one machine."""
    found = texts()
    assert min(map(len, found)) > 8  # which take several passes
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("points", [[*_BEFORE_IT_JOINS, *_WHILE_IT_OPENS], _IN_WAVES])
def test_texts_at_once_lose_nothing_wherever_a_worker_stops(
    points: Sequence[str], how: signal.Signals, alone, tmp_path: Path
) -> None:
    said, port = list[str](), free_port()
    path = tmp_path / "hosts.toml"
    path.write_text(
        f'listen = "127.0.0.1:{port}"\nwait_s = 900\n[[host]]\nname = "host-0"\nlayers = 5\n'
    )
    with workers_that_stop(
        points, port, how, lambda: sum("is lost" in line for line in said)
    ) as stopped:
        found = texts(path, said.append)
    assert found == alone
    assert stopped == points
