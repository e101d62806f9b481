"""Process workers: deaths, hangs, failures to load, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from threading import enumerate as enumerate_threads

import psutil
import pytest
from dsi_toys import RandomDelay, ToyDrafter, ToyServer, autoregressive

from specexec_cli.dsi.messages import DRAFTER, Draft, Drafted, Score
from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.dsi.processes import ProcessWorkers
from specexec_cli.errors import StreamError, WorkerError

SEED, PROMPT = 5, [1, 2, 3]
DRAFT = partial(ToyDrafter, SEED, 0.8, RandomDelay(0.0, 0.002))


def server(number: int, **faults: int) -> partial[ToyServer]:
    return partial(ToyServer, SEED, RandomDelay(0.0, 0.006, number), **faults)


def test_lost_and_hung_processes_lose_and_repeat_no_token():
    """One exits in mid-pass, one hangs, one is killed from outside between two tokens."""
    reports: list[str] = []
    workers = ProcessWorkers(
        [server(0, exits_at=3), server(1, hangs_at=4), server(2), server(3)], [DRAFT]
    )
    pids = [process.pid for process in workers.processes.values()]
    try:
        orchestrator = Orchestrator(workers, DsiConfig(lookahead=2, timeout_s=2.0), reports.append)
        text: list[int] = []
        for commit in orchestrator.generate(PROMPT, 40):
            if not text:
                os.kill(workers.processes[2].pid, signal.SIGKILL)
            text += commit.tokens
        assert text == autoregressive(SEED, PROMPT, 40)
        assert any("server 0 is lost (its process ended with code 7)" in line for line in reports)
        assert any("server 2 is lost (its process ended with code -9)" in line for line in reports)
        # the survivors take another text
        text = [t for c in orchestrator.generate(PROMPT, 10) for t in c.tokens]
        assert text == autoregressive(SEED, PROMPT, 10)
    finally:
        workers.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_worker_that_cannot_load_is_one_clear_error_and_leaves_nothing():
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(WorkerError, match=r"target server 1 did not start: TypeError"):
        ProcessWorkers([server(0), partial(ToyServer, SEED, no_such_option=1)], [DRAFT])
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    assert not [p for p in left if "spawn_main" in " ".join(p.cmdline())]


def test_a_killed_drafter_leaves_plain_decoding():
    reports: list[str] = []
    workers = ProcessWorkers([server(0), server(1)], [DRAFT])
    try:
        orchestrator = Orchestrator(workers, DsiConfig(lookahead=2), reports.append)
        os.kill(workers.processes[DRAFTER].pid, signal.SIGKILL)
        text = [t for c in orchestrator.generate(PROMPT, 24) for t in c.tokens]
        assert text == autoregressive(SEED, PROMPT, 24)
        assert "going on without drafts" in reports[0]
    finally:
        workers.close()


def test_orders_for_a_drafter_in_a_long_pass_keep_nobody_waiting(tmp_path: Path):
    """More bytes of them than its pipe holds; when the pass ends, the newest is drafted for."""
    go_on = tmp_path / "go on"
    busy = partial(_BusyDrafter, SEED, 1.0, until=go_on)
    workers = ProcessWorkers([server(0)], [busy])
    try:
        text = tuple(PROMPT) * 20_000
        for epoch in range(1, 41):
            workers.advance_epoch(epoch, DRAFTER)
            sending = Thread(target=workers.draft, args=(Draft(epoch, text, 1),), daemon=True)
            sending.start()
            sending.join(20.0)
            assert not sending.is_alive(), "the orchestrator waits for a drafter"
        go_on.touch()
        drafted = workers.receive(60.0)
        assert isinstance(drafted, Drafted)
        assert (drafted.epoch, drafted.position) == (40, len(text))
    finally:
        go_on.touch()
        workers.close()


def test_a_worker_that_never_reads_its_orders_can_be_dropped():
    workers = ProcessWorkers([server(0)], [DRAFT])
    try:
        process = workers.processes[DRAFTER]
        os.kill(process.pid, signal.SIGSTOP)
        for epoch in range(1, 41):
            workers.draft(Draft(epoch, tuple(PROMPT) * 20_000, 1))
        workers.drop(DRAFTER)
        assert not psutil.pid_exists(process.pid)
        assert not [thread for thread in enumerate_threads() if "specexec-dsi" in thread.name][1:]
    finally:
        workers.close()
    assert not [thread for thread in enumerate_threads() if "specexec-dsi" in thread.name]


@dataclass
class _DoublyBroken(ToyServer):
    """Fails, and cannot be closed either."""

    def close(self) -> None:
        raise OSError("the disk is full")


def test_an_error_of_a_worker_is_told_though_its_end_fails_too():
    reports: list[str] = []
    workers = ProcessWorkers([partial(_DoublyBroken, SEED, dies_at=1), server(1)], [DRAFT])
    try:
        orchestrator = Orchestrator(workers, DsiConfig(lookahead=2), reports.append)
        text = [t for c in orchestrator.generate(PROMPT, 10) for t in c.tokens]
    finally:
        workers.close()
    assert text == autoregressive(SEED, PROMPT, 10)
    assert len(reports) == 1
    assert "RuntimeError: injected failure" in reports[0]


@dataclass
class _BusyDrafter(ToyDrafter):
    """Its passes take until there is a file."""

    until: Path = Path()

    def start(self, tokens: Sequence[int]) -> None:
        while not self.until.exists():
            time.sleep(0.01)
        super().start(tokens)


def test_logits_are_asked_of_one_worker_and_every_failure_is_one_clear_error():
    """Beside a text whose last tasks are still to be answered, and without losing their answers."""
    slow = partial(ToyServer, SEED, RandomDelay(0.05, 0.06))
    workers = ProcessWorkers([slow, slow, server(2, score_s=30.0)], [DRAFT])
    try:
        orchestrator = Orchestrator(workers, DsiConfig(lookahead=2), lambda line: None)
        early = orchestrator.generate(PROMPT, 40)
        next(early)
        early.close()
        for forgot in (0, 1):
            logits = workers.score(0, Score((7, 8, 9, 10), 2), timeout_s=60.0)
            assert logits.tolist() == [[2.0, forgot], [3.0, forgot]]
            workers.forget()
        with pytest.raises(StreamError, match="the draft model cannot be read"):
            workers.score(DRAFTER, Score((7, 8), 1), timeout_s=60.0)
        with pytest.raises(WorkerError, match="DSI: target server 2 is lost: no logits"):
            workers.score(2, Score((7, 8), 1), timeout_s=0.2)
        os.kill(workers.processes[1].pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(WorkerError, match="DSI: target server 1 is lost: no logits"):
                workers.score(1, Score((7, 8), 1), timeout_s=60.0)
        text = [t for c in orchestrator.generate(PROMPT, 10) for t in c.tokens]
        assert text == autoregressive(SEED, PROMPT, 10)
        assert list(workers.servers) == [0]
    finally:
        workers.close()


def test_an_answer_that_was_not_waited_for_is_taken_for_no_other(monkeypatch):
    """Ctrl-C between the question and its answer, which comes later."""
    workers = ProcessWorkers([server(0)], [DRAFT])
    try:
        for text in ((1, 2, 3), (4, 5, 6)):
            with monkeypatch.context() as patched:
                patched.setattr(workers, "_readable", _interrupted)
                with pytest.raises(KeyboardInterrupt):
                    workers.score(0, Score(text, 1), timeout_s=60.0)
        logits = workers.score(0, Score((7, 8, 9), 2), timeout_s=60.0)
        assert logits[:, 0].tolist() == [2.0]
        with monkeypatch.context() as patched:
            patched.setattr(workers, "_readable", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                workers.score(0, Score((1, 2, 3), 1), timeout_s=60.0)
        orchestrator = Orchestrator(workers, DsiConfig(lookahead=2), lambda line: None)
        text = [t for c in orchestrator.generate(PROMPT, 10) for t in c.tokens]
        assert text == autoregressive(SEED, PROMPT, 10)
    finally:
        workers.close()


def _interrupted(timeout_s: float) -> list[int]:
    raise KeyboardInterrupt


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from functools import partial
from dsi_toys import RandomDelay, ToyDrafter, ToyServer
from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.dsi.processes import ProcessWorkers

if __name__ == "__main__":
    slow = RandomDelay(0.05, 0.06)
    workers = ProcessWorkers([partial(ToyServer, 5, slow)] * 2, [partial(ToyDrafter, 5, 0.8, slow)])
    print(*(process.pid for process in workers.processes.values()), flush=True)
    for commit in Orchestrator(workers, DsiConfig(lookahead=2)).generate([1, 2, 3], 100000):
        {then}
"""


@pytest.mark.parametrize(
    ("then", "signal_number"),
    [("pass", signal.SIGINT), ("pass", signal.SIGKILL), ("raise RuntimeError('crash')", None)],
)
def test_nothing_outlives_the_main_process(tmp_path: Path, then, signal_number):
    """Neither after Ctrl-C, nor after a crash, nor after a kill that no handler sees."""
    script = tmp_path / "main.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), then=then))
    repository = Path(__file__).parents[2]
    main = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(repository)}, start_new_session=True,
    )  # fmt: skip
    assert main.stdout is not None
    with main.stdout:
        pids = [int(word) for word in main.stdout.readline().split()]
        assert len(pids) == 3
        if signal_number == signal.SIGINT:
            os.killpg(main.pid, signal_number)  # as a terminal does: to the whole group
        elif signal_number is not None:
            main.send_signal(signal_number)
        main.wait(30)
    deadline = time.monotonic() + 20
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    """Alive; a zombie whose parent is gone waits for init, not for us."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
