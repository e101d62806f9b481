"""A pool of workers under a virtual clock: waiting costs nothing, so an hour takes milliseconds.

It speaks the protocol of specexec_cli.dsi.messages, so the orchestrator that runs on it is the
one that runs on real devices.
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

_DRAFT_FIRST, _SERVER_NEXT = 0, 1  # order of events at one instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Seconds that fake models take.

    target_row_s is charged for each row a pass carries beyond its first: missing rows of the
    server's cache as well as drafts. A stale pass ends after abort_s, at the latest when done.
    """

    target_s: float
    draft_s: float
    target_row_s: float = 0.0
    prefill_s: float = 0.0
    abort_s: float = 0.0


class VirtualWorkers:
    """Fake drafter and target servers on one event queue.

    Args:
        latencies: what each step costs.
        target: the token the target draws at a position of a sequence.
        drafter: the token the drafter proposes there.
        servers: number of target servers.
    """

    def __init__(
        self, latencies: Latencies, target: TokenAt, drafter: TokenAt, servers: int
    ) -> None:
        self._latencies = latencies
        self._target = target
        self._drafter = drafter
        self._alive = list(range(servers))
        self._cached: dict[int, tuple[int, ...]] = dict.fromkeys(self._alive, ())
        self._running: dict[int, tuple[Verify, float]] = {}  # server -> task, start
        self._draft: Draft | None = None
        self._epoch = 0
        self._now = 0.0
        self._queue: list[tuple[float, int, int, Event]] = []
        self._pushed = 0
        self.busy_s = dict.fromkeys(self._alive, 0.0)  # per server, aborted passes included
        self.forwards = 0  # passes begun, prefills excluded
        self.drafter_busy_s = 0.0

    @property
    def servers(self) -> Sequence[int]:
        """Numbers of the target servers that are alive."""
        return tuple(self._alive)

    def now(self) -> float:
        """Seconds on the virtual clock."""
        return self._now

    def verify(self, server: int, message: Verify) -> None:
        """Begin a pass; its result is due when the pass's latency has gone by."""
        self._running[server] = (message, self._now)
        if message.first > len(message.tokens):
            seconds = self._latencies.prefill_s
        else:
            self.forwards += 1
            seconds = self._latencies.target_s
            if self._latencies.target_row_s:
                missing = len(message.tokens) - common_prefix(self._cached[server], message.tokens)
                seconds += self._latencies.target_row_s * max(0, missing - 1)
        draws = tuple(
            self._target(message.tokens, position)
            for position in range(message.first, len(message.tokens) + 1)
        )
        self._push(self._now + seconds, Verified(server, message.task, draws, seconds))

    def draft(self, message: Draft) -> None:
        """Begin drafting; the token in progress, if any, is given up."""
        self._draft = message
        self._draft_next(list(message.tokens))

    def advance_epoch(self, epoch: int) -> None:
        """Stop stale passes after abort_s and the drafter at once."""
        self._epoch = epoch
        self._draft = None
        for server, (task, _) in self._running.items():
            if task.epoch not in (NEVER_STALE, epoch):
                self._push(self._now + self._latencies.abort_s, Aborted(server, task.task))

    def receive(self, timeout_s: float) -> Event | None:
        """Advance the clock to the next event that still matters."""
        limit = self._now + timeout_s
        while self._queue and self._queue[0][0] <= limit:
            self._now, _, _, event = heapq.heappop(self._queue)
            if isinstance(event, Drafted):
                if self._draft is None or event.epoch != self._draft.epoch:
                    continue
                self.drafter_busy_s += self._latencies.draft_s
                self._sequence.append(event.token)
                self._draft_next(self._sequence)
            elif isinstance(event, WorkerLost):
                self.drop(event.worker)
            elif not self._finish(event):
                continue
            return event
        self._now = limit
        return None

    def drop(self, worker: int) -> None:
        """Forget a worker: no later event of its own is delivered."""
        if worker == DRAFTER:
            self._draft = None
        elif worker in self._alive:
            self._alive.remove(worker)
            self._running.pop(worker, None)

    def kill(self, worker: int, at_s: float) -> None:
        """Let a worker die at a time of the virtual clock."""
        self._push(at_s, WorkerLost(worker, "killed"))

    def close(self) -> None:
        """Nothing runs between events, so nothing is left to stop."""

    def _draft_next(self, sequence: list[int]) -> None:
        self._sequence = sequence
        message = self._draft
        if message is not None and len(sequence) < len(message.tokens) + message.limit:
            position = len(sequence)
            token = self._drafter(sequence, position)
            due = self._now + self._latencies.draft_s
            self._push(due, Drafted(message.epoch, position, token))

    def _finish(self, event: Verified | Aborted | Failed) -> bool:
        """Account for the end of a pass; False if that pass had ended before."""
        task, start = self._running.get(event.server, (None, 0.0))
        if task is None or task.task != event.task:
            return False
        del self._running[event.server]
        self.busy_s[event.server] += self._now - start
        if isinstance(event, Verified):
            self._cached[event.server] = task.tokens
        return True

    def _push(self, due: float, event: Event) -> None:
        self._pushed += 1
        order = _DRAFT_FIRST if isinstance(event, Drafted) else _SERVER_NEXT
        heapq.heappush(self._queue, (due, order, self._pushed, event))
