"""A pool of fake workers under a virtual clock: waiting takes no time, an hour only milliseconds.

The pool has the protocol of specexec_cli.dsi.messages, so the real orchestrator runs on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specexec_cli.core import common_prefix
from specexec_cli.dsi.messages import (
    DRAFTER,
    NEVER_STALE,
    Aborted,
    Draft,
    Drafted,
    Event,
    Failed,
    Verified,
    Verify,
    WorkerLost,
)

TokenAt = Callable[[Sequence[int], int], int]  # (sequence, position) -> token

Span = tuple[int, float, float]  # a pass: its worker, when it began, and when it ended

_DRAFT_FIRST, _SERVER_NEXT = 0, 1  # order of events at one instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Seconds that fake models take.

    target_row_s is added for each row of a pass after the first, whether the row is a draft or was
    missing in the server's cache. A stale pass ends after abort_s, or earlier if it is done.
    """

    target_s: float
    draft_s: float
    target_row_s: float = 0.0
    prefill_s: float = 0.0
    abort_s: float = 0.0


class VirtualWorkers:
    """Fake drafters and target servers on one event queue.

    Args:
        latencies: the seconds of each step.
        target: returns the token that the target draws at a position of a sequence.
        drafter: returns the token that the first drafter proposes there.
        servers: number of target servers.
        more_drafters: for each further drafter, its proposals and its seconds per token.
    """

    def __init__(
        self,
        latencies: Latencies,
        target: TokenAt,
        drafter: TokenAt,
        servers: int,
        more_drafters: Sequence[tuple[TokenAt, float]] = (),
    ) -> None:
        self._latencies = latencies
        self._target = target
        models = ((drafter, latencies.draft_s), *more_drafters)
        self._drafters = {DRAFTER - number: model for number, model in enumerate(models)}
        self._alive = list(range(servers))
        self._cached: dict[int, tuple[int, ...]] = dict.fromkeys(self._alive, ())
        self._running: dict[int, tuple[Verify, float]] = {}  # server -> its task, time it began
        self._drafts: dict[int, Draft] = {}  # drafter -> its present order
        self._sequences: dict[int, list[int]] = {}  # drafter -> its text and drafted tokens
        self._now = 0.0
        self._queue: list[tuple[float, int, int, Event]] = []
        self._pushed = 0
        self.busy_s = dict.fromkeys(self._alive, 0.0)  # per server, aborted passes included
        self.forwards = 0  # passes begun, prefills excluded
        self.drafter_busy_s = 0.0  # sum over all drafters
        self._ended: list[Span] = []

    @property
    def drafters(self) -> Sequence[int]:
        """Numbers of the drafters, dead ones included."""
        return tuple(self._drafters)

    @property
    def servers(self) -> Sequence[int]:
        """Numbers of the living target servers."""
        return tuple(self._alive)

    def now(self) -> float:
        """Seconds on the virtual clock."""
        return self._now

    def spans(self) -> list[Span]:
        """Every pass so far; those of target servers that still run end now."""
        running = [(server, start, self._now) for server, (_, start) in self._running.items()]
        return [*self._ended, *running]

    def verify(self, server: int, message: Verify) -> None:
        """Begins a pass; its result arrives after the pass's latency."""
        self._running[server] = (message, self._now)
        if message.first > len(message.tokens):
            seconds = self._latencies.prefill_s
        else:
            self.forwards += 1
            seconds = self._latencies.target_s
            if self._latencies.target_row_s:
                missing = len(message.tokens) - common_prefix(self._cached[server], message.tokens)
                seconds += self._latencies.target_row_s * max(0, missing - 1)
        self._push(self._now + seconds, self._verified(server, message, seconds))

    def _verified(self, server: int, task: Verify, seconds: float) -> Verified:
        positions = range(task.first, len(task.tokens) + 1)
        draws = tuple(self._target(task.tokens, position) for position in positions)
        return Verified(server, task.task, draws, seconds)

    def draft(self, message: Draft) -> None:
        """Begins drafting; a token in progress is given up."""
        if message.drafter in self._drafters:
            self._drafts[message.drafter] = message
            self._sequences[message.drafter] = list(message.tokens)
            self._draft_next(message)

    def advance_epoch(self, epoch: int, drafter: int) -> None:
        """Stops stale passes after abort_s, and the drafter at once."""
        self._drafts.pop(drafter, None)
        for server, (task, _) in self._running.items():
            if task.drafter == drafter and task.epoch not in (NEVER_STALE, epoch):
                self._push(self._now + self._latencies.abort_s, Aborted(server, task.task))

    def receive(self, timeout_s: float) -> Event | None:
        """Advances the clock to the next event that still matters, and returns the event."""
        limit = self._now + timeout_s
        while self._queue and self._queue[0][0] <= limit:
            self._now, _, _, event = heapq.heappop(self._queue)
            if isinstance(event, Drafted):
                order = self._drafts.get(event.drafter)
                if order is None or event.epoch != order.epoch:
                    continue
                seconds = self._drafters[event.drafter][1]
                self.drafter_busy_s += seconds
                self._ended.append((event.drafter, self._now - seconds, self._now))
                self._sequences[event.drafter].append(event.token)
                self._draft_next(order)
            elif isinstance(event, WorkerLost):
                self.drop(event.worker)
            elif not self._finish(event):
                continue
            return event
        self._now = limit
        return None

    def drop(self, worker: int) -> None:
        """Removes a worker, whose later events are not delivered."""
        if worker <= DRAFTER:
            self._drafts.pop(worker, None)
        elif worker in self._alive:
            self._alive.remove(worker)
            self._running.pop(worker, None)

    def kill(self, worker: int, at_s: float) -> None:
        """Makes a worker die at a time on the virtual clock."""
        self._push(at_s, WorkerLost(worker, "killed"))

    def close(self) -> None:
        """Does nothing: nothing runs between events."""

    def _draft_next(self, order: Draft) -> None:
        sequence = self._sequences[order.drafter]
        if len(sequence) < len(order.tokens) + order.limit:
            due = self._now + self._drafters[order.drafter][1]
            self._push(due, self._drafted(order, sequence))

    def _drafted(self, order: Draft, sequence: Sequence[int]) -> Drafted:
        token = self._drafters[order.drafter][0](sequence, len(sequence))
        return Drafted(order.epoch, len(sequence), token, order.drafter)

    def _finish(self, event: Verified | Aborted | Failed) -> bool:
        """Counts the end of a pass; False if the pass had ended before."""
        task, start = self._running.get(event.server, (None, 0.0))
        if task is None or task.task != event.task:
            return False
        del self._running[event.server]
        self.busy_s[event.server] += self._now - start
        self._ended.append((event.server, start, self._now))
        if isinstance(event, Verified):
            self._cached[event.server] = task.tokens
        return True

    def _push(self, due: float, event: Event) -> None:
        self._pushed += 1
        order = _DRAFT_FIRST if isinstance(event, Drafted) else _SERVER_NEXT
        heapq.heappush(self._queue, (due, order, self._pushed, event))
