"""Keeps track of a pool's target servers: which are idle, their tasks, and their caches."""

from __future__ import annotations

from collections.abc import Sequence

from specexec_cli.dsi.messages import (
    DRAFTER,
    Aborted,
    Event,
    Failed,
    Verified,
    Verify,
    WorkerLost,
    Workers,
)
from specexec_cli.errors import SpecexecError, WorkerError


class Servers:
    """The target servers of a pool.

    Each server is idle, runs one task, rests after an error until the next text, or is lost.

    Args:
        workers: the pool.
        timeout_s: seconds after which the server of a task counts as hung.
    """

    def __init__(self, workers: Workers, timeout_s: float) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        self._idle = set(workers.servers)
        self._running: dict[int, tuple[Verify, float]] = {}  # by server: its task and deadline
        # by server: how many rows of its cache are known to be useful, and for which drafter
        self._cached = dict.fromkeys(workers.servers, (0, DRAFTER))
        self._resting: dict[int, SpecexecError] = {}

    @property
    def idle(self) -> Sequence[int]:
        """Numbers of the idle servers, rising."""
        return sorted(self._idle)

    @property
    def left(self) -> int:
        """How many servers are idle or run a task."""
        return len(self._idle) + len(self._running)

    def begin(self) -> None:
        """Begins a new text: no cached row is useful, and servers that rested are idle again."""
        self._cached = dict.fromkeys(self._cached, (0, DRAFTER))
        self._idle |= self._resting.keys()
        self._resting.clear()

    def nearest(self, drafter: int, committed: int) -> int:
        """The idle server that has the most useful rows for a task.

        Args:
            drafter: the drafter whose drafts the task verifies.
            committed: tokens of the committed text, which are useful for every drafter.
        """

        def useful(server: int) -> tuple[int, int]:
            rows, whose = self._cached[server]
            return rows if whose == drafter else min(rows, committed), -server

        return max(self._idle, key=useful)

    def send(self, server: int, task: Verify) -> None:
        """Gives a task to an idle server."""
        self._idle.discard(server)
        self._running[server] = (task, self._workers.now() + self._timeout_s)
        self._workers.verify(server, task)

    def next_event(self) -> Event:
        """Waits for the next event. A server with a task past its deadline is dropped as lost.

        Raises:
            WorkerError: no server is left.
            SpecexecError: all servers that are left rest; this is the latest one's error.
        """
        while True:
            if not self._running and self._resting:
                raise list(self._resting.values())[-1]
            if not self._running:
                raise WorkerError(
                    "every DSI target server is lost; "
                    "decode on one device instead: `method='specexec'`"
                )
            server, (_, deadline) = min(self._running.items(), key=lambda item: item[1][1])
            event = self._workers.receive(max(0.0, deadline - self._workers.now()))
            if event is not None:
                return event
            if self._workers.now() >= deadline:
                self._workers.drop(server)
                return WorkerLost(server, f"no answer for {self._timeout_s:g} s")

    def answered(self, event: Verified | Aborted | Failed) -> Verify | None:
        """Marks the server of an answer as idle.

        Returns:
            the task that was answered; None if it is not the one that the server runs.
        """
        running = self._running.get(event.server)
        if running is None or running[0].task != event.task:
            return None
        del self._running[event.server]
        self._idle.add(event.server)
        return running[0]

    def holds(self, server: int, task: Verify) -> None:
        """Notes that a server's cache has the rows of a task."""
        self._cached[server] = len(task.tokens), task.drafter

    def cut_cached(self, drafter: int, rows: int) -> None:
        """Notes that rows from `rows` on are useless, since drafts of this drafter were wrong."""
        for server, (known, whose) in self._cached.items():
            if whose == drafter:
                self._cached[server] = min(known, rows), drafter

    def rest(self, server: int, error: SpecexecError) -> None:
        """Gives a server no more tasks until the next text, since its cache may be wrong.

        Args:
            server: its number.
            error: that its last task ended with.
        """
        self._idle.discard(server)
        self._resting[server] = error

    def lose(self, server: int) -> Verify | None:
        """Forgets a server that will not answer again.

        Returns:
            the task that it held, for another server to run, or None.
        """
        self._idle.discard(server)
        self._resting.pop(server, None)
        self._cached.pop(server, None)
        task, _ = self._running.pop(server, (None, 0.0))
        return task
