"""The two loops a worker runs, and a pool of threads that run them.

A worker knows its model through TargetServer or DraftServer and its pool through an inbox, an
outbox and the epoch; whether it is a thread or a process is not its business.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from specexec_cli.config import SamplingConfig
from specexec_cli.dsi.messages import (
    DRAFTER,
    NEVER_STALE,
    Aborted,
    Configure,
    Draft,
    Drafted,
    Event,
    Ready,
    Verified,
    Verify,
    WorkerLost,
)

Order = Verify | Draft | Configure
Stale = Callable[[], bool]
Message = TypeVar("Message", covariant=True)


class TargetServer(Protocol):
    """One instance of the target with a KV cache of its own."""

    @property
    def bytes_streamed(self) -> int:
        """Bytes that came over the link so far."""
        ...

    def ready(self) -> Ready:
        """What the pool must know before the first task."""
        ...

    def configure(self, sampling: SamplingConfig) -> None:
        """Draw the tokens of later tasks by `sampling`."""
        ...

    def verify(self, tokens: Sequence[int], first: int, stale: Stale) -> tuple[int, ...] | None:
        """Draw the target's tokens at positions first .. len(tokens) after `tokens`.

        The cache keeps the longest common prefix of what it holds and `tokens`. `stale` is
        polled between layers; once it is true the pass is given up, the cache holds at most the
        common prefix, and the answer is None. Draws may end early, behind the first that
        differs from `tokens`: nothing behind it is of use.
        """
        ...


class DraftServer(Protocol):
    """The draft model with its KV cache."""

    def ready(self) -> Ready:
        """What the pool must know before the first task."""
        ...

    def configure(self, sampling: SamplingConfig) -> None:
        """Guess at tokens drawn by `sampling`."""
        ...

    def start(self, tokens: Sequence[int]) -> None:
        """Continue after `tokens`, keeping the cached rows that agree."""
        ...

    def next_token(self) -> int:
        """Draft one more token."""
        ...


class Outbox(Protocol):
    """Where a worker puts what it has to tell."""

    def put(self, event: Event) -> None:
        """Send one event to the orchestrator."""
        ...


class Inbox(Protocol[Message]):
    """Where a worker's orders come from; None ends the worker."""

    def get(self) -> Message | None:
        """Wait for the next order."""
        ...


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shared = min(len(left), len(right))
    if left[:shared] == right[:shared]:
        return shared
    return next(i for i in range(shared) if left[i] != right[i])


def run_task(
    server: TargetServer, number: int, task: Verify, epoch: Callable[[], int]
) -> Verified | Aborted:
    """One verification task, from the stale check to its answer."""

    def stale() -> bool:
        return task.epoch not in (NEVER_STALE, epoch())

    begin, bytes_before = time.perf_counter(), server.bytes_streamed
    draws = None if stale() else server.verify(task.tokens, task.first, stale)
    streamed = server.bytes_streamed - bytes_before
    if draws is None:
        return Aborted(number, task.task, streamed)
    return Verified(number, task.task, draws, time.perf_counter() - begin, streamed)


def run_draft(server: DraftServer, order: Draft, epoch: Callable[[], int]) -> Iterator[Drafted]:
    """Draft, token after token, until the limit or until the epoch moves on."""
    if order.epoch != epoch():
        return
    server.start(order.tokens)
    for position in range(len(order.tokens), len(order.tokens) + order.limit):
        token = server.next_token()
        if order.epoch != epoch():
            return
        yield Drafted(order.epoch, position, token)


def serve_target(
    server: TargetServer,
    number: int,
    inbox: Inbox[Verify | Configure],
    outbox: Outbox,
    epoch: Callable[[], int],
) -> None:
    """Answer verification tasks until the inbox says None."""
    while (task := inbox.get()) is not None:
        if isinstance(task, Configure):
            server.configure(task.sampling)
        else:
            outbox.put(run_task(server, number, task, epoch))


def serve_drafter(
    server: DraftServer, inbox: Inbox[Draft | Configure], outbox: Outbox, epoch: Callable[[], int]
) -> None:
    """Draft what is ordered until the inbox says None."""
    while (order := inbox.get()) is not None:
        if isinstance(order, Configure):
            server.configure(order.sampling)
            continue
        for drafted in run_draft(server, order, epoch):
            outbox.put(drafted)


class ThreadWorkers:
    """A pool of threads: for models that release the interpreter's lock, and for tests.

    A thread cannot be killed: a dropped one is left behind and its events are ignored.
    """

    def __init__(self, drafter: DraftServer | None, servers: Sequence[TargetServer]) -> None:
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._epoch = 0
        self._alive = list(range(len(servers)))
        self._dropped: set[int] = set()
        self._inboxes: dict[int, queue.SimpleQueue[Order | None]] = {}
        self._threads: dict[int, threading.Thread] = {}
        for number, server in enumerate(servers):
            self._start(number, serve_target, server, number)
        if drafter is not None:
            self._start(DRAFTER, serve_drafter, drafter)

    @property
    def servers(self) -> Sequence[int]:
        """Numbers of the target servers that are alive."""
        return tuple(self._alive)

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.perf_counter()

    def configure(self, sampling: SamplingConfig) -> None:
        """Tell every worker how the next generation draws its tokens."""
        for inbox in self._inboxes.values():
            inbox.put(Configure(sampling))

    def verify(self, server: int, message: Verify) -> None:
        """Hand a task to an idle server."""
        self._inboxes[server].put(message)

    def draft(self, message: Draft) -> None:
        """Set the drafter to work on a new prefix."""
        if DRAFTER in self._inboxes:
            self._inboxes[DRAFTER].put(message)

    def advance_epoch(self, epoch: int) -> None:
        """Make work of every earlier epoch stale."""
        self._epoch = epoch

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
        self._epoch = -2  # no order has this epoch: everything is stale
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
                loop(*args, inbox, outbox, lambda: self._epoch)
            except Exception as error:
                outbox.put(WorkerLost(number, f"{type(error).__name__}: {error}"))

        self._inboxes[number] = inbox
        self._threads[number] = threading.Thread(target=run, daemon=True, name=f"dsi-{number}")
        self._threads[number].start()


class _ThreadOutbox:
    def __init__(self, events: queue.SimpleQueue[tuple[int, Event]], number: int) -> None:
        self._events = events
        self._number = number

    def put(self, event: Event) -> None:
        self._events.put((self._number, event))
