"""The target servers of a pool: which are idle, what the others run, and what their caches hold."""

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
    """Each is idle, runs one task, rests after an error until the next text, or is lost.

    Args:
        workers: the pool.
        timeout_s: a task that takes longer counts as hung.
    """

    def __init__(self, workers: Workers, timeout_s: float) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        self._idle = set(workers.servers)
        self._running: dict[int, tuple[Verify, float]] = {}  # server -> task, deadline
        # server -> rows of its cache known to be of use, and to the drafts of which drafter
        self._cached = dict.fromkeys(workers.servers, (0, DRAFTER))
        self._resting: dict[int, SpecexecError] = {}

    @property
    def idle(self) -> Sequence[int]:
        """Those without a task, in order."""
        return sorted(self._idle)

    @property
    def left(self) -> int:
        """How many are idle or run a task."""
        return len(self._idle) + len(self._running)

    def begin(self) -> None:
        """With a new text nothing cached is of use, and those that rested work again."""
        self._cached = dict.fromkeys(self._cached, (0, DRAFTER))
        self._idle |= self._resting.keys()
        self._resting.clear()

    def nearest(self, drafter: int, committed: int) -> int:
        """The idle server with the fewest rows to catch up, for a task of this drafter's drafts.

        Args:
            committed: tokens of the text.
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
        """Wait for the next event; a task past its deadline becomes the loss of its server.

        Raises:
            WorkerError: no server is left.
            SpecexecError: the error of the last server that rests, where all that are left do.
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
        """The task that a server is done with, which is idle again; None where it is another."""
        running = self._running.get(event.server)
        if running is None or running[0].task != event.task:
            return None
        del self._running[event.server]
        self._idle.add(event.server)
        return running[0]

    def holds(self, server: int, task: Verify) -> None:
        """The rows of a task are in a server's cache."""
        self._cached[server] = len(task.tokens), task.drafter

    def cut_cached(self, drafter: int, rows: int) -> None:
        """Rows of drafts that were wrong are of no use."""
        for server, (known, whose) in self._cached.items():
            if whose == drafter:
                self._cached[server] = min(known, rows), drafter

    def rest(self, server: int, error: SpecexecError) -> None:
        """A server gets no more tasks until the next text begins, since its cache may be wrong.

        Args:
            error: what its last task ended with.
        """
        self._idle.discard(server)
        self._resting[server] = error

    def lose(self, server: int) -> Verify | None:
        """Forget a server that will not answer again.

        Returns:
            the task that it held, for another server to run, or None.
        """
        self._idle.discard(server)
        self._resting.pop(server, None)
        self._cached.pop(server, None)
        task, _ = self._running.pop(server, (None, 0.0))
        return task
