"""DSI workers as threads of this process: quicker than processes, and seen by coverage."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from specexec_cli.config import SamplingConfig
from specexec_cli.dsi.messages import (
    DRAFTER,
    Configure,
    Draft,
    End,
    Event,
    Scored,
    Verify,
    WorkerLost,
)
from specexec_cli.dsi.workers import (
    DraftServer,
    Order,
    TargetServer,
    serve_drafter,
    serve_target,
)


class ThreadWorkers:
    """Target servers and drafters, each in a thread of its own.

    A thread cannot be killed: a dropped one is left behind and its events are ignored.
    """

    def __init__(
        self,
        drafter: DraftServer | None,
        servers: Sequence[TargetServer],
        more_drafters: Sequence[DraftServer] = (),
    ) -> None:
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        drafters = ([drafter] if drafter is not None else []) + [*more_drafters]
        self.drafters: Sequence[int] = [DRAFTER - number for number in range(len(drafters))]
        self._epochs: dict[int, int] = {}
        self._alive = list(range(len(servers)))
        self._dropped: set[int] = set()
        self._inboxes: dict[int, queue.SimpleQueue[Order | None]] = {}
        self._threads: dict[int, threading.Thread] = {}
        for number, server in enumerate(servers):
            self._start(number, serve_target, server, number)
        for number, each in zip(self.drafters, drafters, strict=True):
            self._start(number, serve_drafter, each)

    @property
    def servers(self) -> Sequence[int]:
        """Numbers of the target servers that are alive."""
        return tuple(self._alive)

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.perf_counter()

    def configure(
        self, sampling: SamplingConfig, rejection: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        """Tell every worker how the next generation draws its tokens."""
        for inbox in self._inboxes.values():
            inbox.put(Configure(sampling, rejection, tuple(prompt)))

    def end(self, tokens: Sequence[int]) -> None:
        """Tell every worker the text that a generation has ended with."""
        for inbox in self._inboxes.values():
            inbox.put(End(tuple(tokens)))

    def verify(self, server: int, message: Verify) -> None:
        """Hand a task to an idle server."""
        self._inboxes[server].put(message)

    def draft(self, message: Draft) -> None:
        """Set a drafter to work on a new prefix."""
        if message.drafter in self._inboxes:
            self._inboxes[message.drafter].put(message)

    def advance_epoch(self, epoch: int, drafter: int) -> None:
        """Make work of a drafter's earlier epochs stale."""
        self._epochs[drafter] = epoch

    def receive(self, timeout_s: float) -> Event | None:
        """The next event of a worker that was not dropped."""
        deadline = self.now() + timeout_s
        while True:
            try:
                worker, event = self._events.get(timeout=max(0.0, deadline - self.now()))
            except queue.Empty:
                return None
            if worker not in self._dropped:
                if isinstance(event, WorkerLost):
                    self.drop(worker)
                return event

    def drop(self, worker: int) -> None:
        """Ignore a worker from now on; its thread ends when its present task does."""
        self._dropped.add(worker)
        if worker in self._alive:
            self._alive.remove(worker)
        self._inboxes[worker].put(None)

    def close(self, timeout_s: float = 10.0) -> None:
        """End every thread and wait for those that were not dropped."""
        self._epochs.clear()  # everything is stale
        for inbox in self._inboxes.values():
            inbox.put(None)
        for number, thread in self._threads.items():
            if number not in self._dropped:
                thread.join(timeout_s)

    def _start(self, number: int, loop: Callable[..., None], *args: object) -> None:
        inbox: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        outbox = _ThreadOutbox(self._events, number)

        def run() -> None:
            try:
                loop(*args, inbox, outbox, lambda drafter: self._epochs.get(drafter, -2))
            except Exception as error:
                outbox.put(WorkerLost(number, f"{type(error).__name__}: {error}"))

        self._inboxes[number] = inbox
        self._threads[number] = threading.Thread(target=run, daemon=True, name=f"dsi-{number}")
        self._threads[number].start()


class _ThreadOutbox:
    def __init__(self, events: queue.SimpleQueue[tuple[int, Event]], number: int) -> None:
        self._events = events
        self._number = number

    def put(self, event: Event | Scored) -> None:
        assert not isinstance(event, Scored), "nobody asks this pool for logits"
        self._events.put((self._number, event))
