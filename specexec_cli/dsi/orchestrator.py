"""Speculation parallelism: one drafter that never stops, several target servers, one text.

The text is the target's: a token is committed only when the target drew it, and draws are keyed
by (seed, position), so neither timing, drafts, servers nor lost workers can change it. The
orchestrator knows no model, no device and no real clock: it runs unchanged on threads, processes
and under the simulator's virtual clock.

Words: `sequence` is the committed text followed by drafts not verified yet; position i is asked
when a task that draws it has been sent; a task with the first d tokens of the sequence draws
every position not yet asked up to d.

Source: Timor et al., arXiv:2405.14105, algorithm 1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

from specexec_cli.dsi.messages import (
    DRAFTER,
    NEVER_STALE,
    Draft,
    Drafted,
    Event,
    Failed,
    Verified,
    Verify,
    WorkerLost,
    Workers,
)
from specexec_cli.errors import ConfigError, NonFiniteLogitsError, SpecexecError, WorkerError


@dataclass(frozen=True, slots=True, kw_only=True)
class DsiConfig:
    """How drafts are cut into verification tasks, and how long a worker may be silent."""

    lookahead: int = 5  # draft tokens before each verification
    max_rows: int = 64  # most draft tokens in one task, when servers are scarce
    timeout_s: float = 120.0  # a task that takes longer counts as hung

    def __post_init__(self) -> None:
        if self.lookahead < 1:
            raise ConfigError(f"`lookahead` must be 1 or more, not {self.lookahead}")
        if self.max_rows < self.lookahead:
            raise ConfigError(
                f"`lookahead` ({self.lookahead}) cannot exceed {self.max_rows} tokens per task"
            )
        if not self.timeout_s > 0:
            raise ConfigError(f"the worker timeout must be above 0 s, not {self.timeout_s}")


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens committed by one event, in order."""

    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]  # per token: True if the drafter had proposed it
    pending_rows: int  # committed tokens that the pass behind the event had to run


def _log(message: str) -> None:
    logging.getLogger("specexec").warning(message)


class Orchestrator:
    """Drives a pool of workers through one generation after another.

    Args:
        workers: the pool; the caller closes it.
        config: lookahead and timeouts.
        report: told, in one line, of each worker that is lost or fails.
    """

    def __init__(
        self, workers: Workers, config: DsiConfig, report: Callable[[str], None] = _log
    ) -> None:
        self._workers = workers
        self._config = config
        self._report = report
        self._epoch = 0
        self._tasks = 0
        self._drafter_alive = True
        self._drafting = True  # in this generation
        self._idle = set(workers.servers)
        self._running: dict[int, tuple[Verify, float]] = {}  # server -> task, deadline
        self._cached = dict.fromkeys(workers.servers, 0)  # rows of its cache known to be of use
        self._sequence: list[int] = []
        self._committed = 0
        self._goal = 0  # length of the finished text
        self._asked = 0  # the highest position some task draws
        self._draws: dict[int, int] = {}  # position -> the target's draw, not committed yet
        self._undrawable: dict[int, SpecexecError] = {}  # position -> why no server can draw it
        self._orphans: list[Verify] = []  # tasks that another server must take
        self._resting: dict[int, SpecexecError] = {}  # servers that failed, until the next text
        self.bytes_streamed = 0  # by all servers for all tasks answered so far

    @property
    def passes(self) -> int:
        """Tasks sent since the orchestrator began: verifications, prefills and stale ones."""
        return self._tasks

    def generate(
        self, prompt: Sequence[int], max_tokens: int, drafts: bool = True
    ) -> Generator[Commit, None, None]:
        """Yield the target's continuation of `prompt`, `max_tokens` tokens in all.

        Closing the generator early ends the work; the pool stays usable. One generation must have
        ended, or have been closed, before the next one begins.

        Args:
            drafts: False for plain decoding: one token after another, by one server.
        Raises:
            NonFiniteLogitsError: the next token cannot be drawn, whichever server tries.
            WorkerError: no target server is left.
            SpecexecError: a pass failed in every server that is left; they stay usable.
        """
        if not prompt or max_tokens < 1:
            raise ValueError("a prompt of at least one token and max_tokens of at least 1")
        self._sequence = list(prompt)
        self._committed = len(prompt)
        self._goal = len(prompt) + max_tokens
        self._cached = dict.fromkeys(self._cached, 0)
        self._drafting = drafts
        self._idle |= self._resting.keys()
        self._resting.clear()
        self._restart()
        self._dispatch()
        if drafts:
            self._broadcast(tuple(prompt))
        try:
            while self._committed < self._goal:
                if self._committed in self._undrawable:
                    raise self._undrawable[self._committed]
                commit = self._handle(self._next_event())
                if self._committed < self._goal:
                    self._dispatch()
                if commit is not None:
                    yield commit
        finally:
            self._end_epoch()

    def _restart(self) -> None:
        """Begin a new speculation after the committed text; all earlier work is stale."""
        self._end_epoch()
        self._asked = self._committed - 1
        limit = self._goal - 1 - self._committed  # the last token is never drafted
        if self._drafting and self._drafter_alive and limit > 0:
            self._workers.draft(Draft(self._epoch, tuple(self._sequence), limit))

    def _end_epoch(self) -> None:
        self._epoch += 1
        self._draws.clear()
        self._undrawable.clear()
        self._orphans.clear()
        self._workers.advance_epoch(self._epoch)

    def _broadcast(self, prompt: tuple[int, ...]) -> None:
        """Let the servers without a task fill their caches with the prompt."""
        if len(prompt) > 1:
            for server in sorted(self._idle):
                self._send(server, prompt, first=len(prompt) + 1, epoch=NEVER_STALE)

    def _dispatch(self) -> None:
        """Give idle servers the tasks that are due.

        A task is due when `lookahead` positions are unasked, when the drafter has nothing more
        to add, or when no running task draws the next position to commit: the target never
        waits for a slow drafter, so DSI is never slower than decoding without speculation.
        """
        while self._idle:
            if self._orphans:
                task = self._orphans.pop(0)
                self._send(self._nearest(), task.tokens, task.first, self._epoch)
                continue
            unasked = len(self._sequence) - self._asked
            urgent = self._asked < self._committed or len(self._sequence) >= self._goal - 1
            if unasked < 1 or (unasked < self._config.lookahead and not urgent):
                return
            end = self._asked + min(unasked, self._config.max_rows)
            self._send(self._nearest(), tuple(self._sequence[:end]), self._asked + 1, self._epoch)
            self._asked = end

    def _nearest(self) -> int:
        """The idle server with the fewest rows to catch up."""
        return max(self._idle, key=lambda server: (self._cached[server], -server))

    def _send(self, server: int, tokens: tuple[int, ...], first: int, epoch: int) -> None:
        self._tasks += 1
        task = Verify(self._tasks, epoch, tokens, first)
        self._idle.discard(server)
        self._running[server] = (task, self._workers.now() + self._config.timeout_s)
        self._workers.verify(server, task)

    def _next_event(self) -> Event:
        """Wait for the next event; a task past its deadline becomes the loss of its server."""
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
                return WorkerLost(server, f"no answer for {self._config.timeout_s:g} s")

    def _handle(self, event: Event) -> Commit | None:
        """Apply one event; return the tokens it committed."""
        if isinstance(event, Drafted):
            if event.epoch == self._epoch and event.position == len(self._sequence):
                self._sequence.append(event.token)
        elif isinstance(event, WorkerLost):
            self._lose(event)
        elif event.server in self._running and self._running[event.server][0].task == event.task:
            self.bytes_streamed += event.bytes_streamed
            task, _ = self._running.pop(event.server)
            self._idle.add(event.server)
            if isinstance(event, Verified):
                return self._take(event, task)
            if isinstance(event, Failed):
                self._fail(event, task)
        return None

    def _take(self, event: Verified, task: Verify) -> Commit | None:
        """Apply the draws of a task."""
        if task.epoch in (self._epoch, NEVER_STALE):
            self._cached[event.server] = len(task.tokens)
        if task.epoch != self._epoch:
            return None
        self._draws.update(zip(range(task.first, self._goal), event.draws, strict=False))
        end = task.first + len(event.draws)
        if end <= len(task.tokens) and event.draws == task.tokens[task.first : end]:
            # no draft was wrong, so the rest is still wanted: its first draw fails, or comes now
            self._orphan(replace(task, first=end))
        drafts = max(0, len(task.tokens) - self._committed)
        committed = self._commit()
        if not committed:
            return None
        tokens, drafted = zip(*committed, strict=True)
        return Commit(tokens, drafted, max(1, event.rows - drafts))

    def _commit(self) -> list[tuple[int, bool]]:
        """Move draws into the text, strictly in order, up to the first that was not drafted.

        Returns:
            The tokens, each with whether it was drafted.
        """
        committed = []
        while (token := self._draws.pop(self._committed, None)) is not None:
            position = self._committed
            self._committed += 1
            if position < len(self._sequence) and self._sequence[position] == token:
                committed.append((token, True))
                continue
            del self._sequence[position:]
            self._sequence.append(token)
            committed.append((token, False))
            self._cached = {s: min(rows, position) for s, rows in self._cached.items()}
            if self._committed < self._goal:
                self._restart()
            break
        return committed

    def _orphan(self, task: Verify) -> None:
        """Send a task again, ahead of new ones, unless it is stale."""
        if task.epoch == self._epoch:
            self._orphans.append(task)
            self._orphans.sort(key=lambda orphan: orphan.first)

    def _fail(self, event: Failed, task: Verify) -> None:
        """Go on after an error that left its server usable.

        Logits that are not finite are so in every server: the text ends at their position, if it
        comes to it. Whatever else failed may be that server's own trouble: another one takes the
        task, and this one rests until the next text.
        """
        if isinstance(event.error, NonFiniteLogitsError):
            self._take_apart(event.error, task)
            return
        if task.epoch not in (self._epoch, NEVER_STALE):
            return
        self._idle.discard(event.server)
        self._resting[event.server] = event.error
        self._orphan(task)
        if left := len(self._idle) + len(self._running):
            self._report(
                f"DSI target server {event.server}: {event.error}; {left} go on without it"
            )

    def _take_apart(self, error: NonFiniteLogitsError, task: Verify) -> None:
        """Find out whether a position can be drawn without the drafts behind it.

        A draft whose values overflow spoils the rows before it, too: the attention mask gives it
        the weight 0, and 0 times infinity is not a number. The target alone would not meet it.
        """
        if task.epoch != self._epoch:
            return
        if task.first == len(task.tokens):
            self._undrawable[task.first] = error
            return
        self._orphan(replace(task, tokens=task.tokens[: task.first]))
        self._orphan(replace(task, first=task.first + 1))

    def _lose(self, event: WorkerLost) -> None:
        """Go on without a worker; the task it held is sent again, ahead of new ones."""
        if event.worker == DRAFTER:
            self._drafter_alive = False
            self._report(f"the DSI drafter is lost ({event.reason}); going on without drafts")
            return
        self._idle.discard(event.worker)
        self._resting.pop(event.worker, None)
        self._cached.pop(event.worker, None)
        task, _ = self._running.pop(event.worker, (None, 0.0))
        if task is not None:
            self._orphan(task)
        self._report(
            f"DSI target server {event.worker} is lost ({event.reason}); "
            f"{len(self._idle) + len(self._running)} left"
        )
