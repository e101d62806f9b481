"""Speculation parallelism: drafters that never stop, several target servers, one text.

A token is committed only when the target drew it, and draws are keyed by (seed, position). So
neither timing, drafts, servers nor lost workers can change the text. The orchestrator knows no
model, no device and no real clock: it runs unchanged on threads, on processes and under the
simulator's virtual clock.

Words: a branch is the committed text followed by one drafter's drafts that are not verified yet. A
position of it is asked when a task that draws the target's token there has been sent. A task with
the first d tokens of a branch draws every position up to d that is not asked yet. With rejection
sampling a draw is the test of a draft, and the text has the target's distribution, but is not the
one of plain decoding with the same seed.

Source: Timor et al., arXiv:2405.14105, algorithm 1. A thread C_J of length k is a position of a
branch. Lines 7-11 are `_commit`: branches with another token than the verifier's end; of those with
the same token, the first is verified, and positions that one branch's tasks draw are not drawn for
another. Preemption (section 3.1) makes the tokens of `lookahead` threads one task. Two things
differ. A drafter continues only its own drafts, not those of the other drafters too, and begins
again after the committed text when they are wrong. With rejection sampling, which replaces lines
8-9 as section 3.1 suggests, only the first branch's draft of a position is tested, and the other
branches go on if they have the token that results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specexec_cli.dsi.branches import Branch
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
from specexec_cli.dsi.servers import Servers
from specexec_cli.errors import ConfigError, NonFiniteLogitsError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DsiConfig:
    """How drafts are cut into verification tasks, and how long a worker may be silent."""

    lookahead: int = 5  # draft tokens before each verification
    max_rows: int = 64  # most draft tokens of a task, reached when no server was free for long
    timeout_s: float = 120.0  # seconds after which the server of a task counts as hung

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
    drafted: tuple[bool, ...]  # for each token, whether a drafter had proposed it
    pending_rows: int  # committed tokens among the rows of the pass that led to this commit


# judge(target_probs, draft, position) gives the token of a position by rejection sampling. `draft`
# is the drafted token and its distribution; with None the token is drawn from target_probs.
Judge = Callable[
    ["NDArray[np.float32]", "tuple[int, NDArray[np.float32]] | None", int],
    int,
]


def _log(message: str) -> None:
    logging.getLogger("specexec").warning(message)


class Orchestrator:
    """Drives a pool of workers through one generation after another.

    Args:
        workers: the pool; the caller closes it.
        config: lookahead and timeouts.
        report: called with one line for each worker that is lost or fails.
    Attributes:
        bytes_streamed: bytes that all servers streamed for all tasks answered so far.
    """

    def __init__(
        self, workers: Workers, config: DsiConfig, report: Callable[[str], None] = _log
    ) -> None:
        self._workers = workers
        self._config = config
        self._report = report
        self._epochs = 0  # number of epochs so far, of all branches
        self._tasks = 0  # number of tasks so far
        self._drafting = True  # whether this generation uses drafts
        self._judge: Judge | None = None  # this generation's, with rejection sampling
        self._branches = [Branch(number) for number in workers.drafters or (DRAFTER,)]
        self._servers = Servers(workers, config.timeout_s)
        self._text: list[int] = []  # prompt and committed tokens
        self._goal = 0  # length of the finished text
        self._orphans: list[Verify] = []  # tasks that another server must do
        self.bytes_streamed = 0

    @property
    def passes(self) -> int:
        """Tasks made since the orchestrator began, prefills and stale ones included."""
        return self._tasks

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        drafts: bool = True,
        judge: Judge | None = None,
    ) -> Generator[Commit, None, None]:
        """Yields the target's continuation of `prompt`, `max_tokens` tokens in all.

        Closing the generator early ends the work; the pool stays usable. A generation must have
        ended or been closed before the next one begins.

        Args:
            prompt: at least one token.
            max_tokens: at least 1.
            drafts: False for plain decoding, token after token by one server.
            judge: decides drafts by rejection sampling; the workers must be configured for it. The
                text then has the target's distribution, but may differ from run to run.
        Raises:
            NonFiniteLogitsError: the next token cannot be drawn by any server.
            WorkerError: no target server is left.
            SpecexecError: a pass failed in every server that is left; they stay usable.
        """
        if not prompt or max_tokens < 1:
            raise ValueError("a prompt of at least one token and max_tokens of at least 1")
        self._text = list(prompt)
        self._goal = len(prompt) + max_tokens
        self._drafting, self._judge = drafts, judge
        self._servers.begin()
        for branch in self._branches:
            self._restart(branch)
        self._dispatch()
        if drafts:
            self._broadcast(tuple(prompt))
        try:
            while len(self._text) < self._goal:
                for branch in self._branches:
                    if len(self._text) in branch.undrawable:
                        raise branch.undrawable[len(self._text)]
                commit = self._handle(self._servers.next_event())
                if len(self._text) < self._goal:
                    self._dispatch()
                if commit is not None:
                    yield commit
        finally:
            for branch in self._branches:
                self._end_epoch(branch)

    def _restart(self, branch: Branch) -> None:
        """Begins a new speculation after the committed text; the branch's earlier work is stale."""
        self._end_epoch(branch)
        limit = self._goal - 1 - len(self._text)  # the last token is never drafted
        if self._drafting and branch.alive and limit > 0:
            draft = Draft(branch.epoch, tuple(self._text), limit, branch.drafter)
            self._workers.draft(draft)

    def _end_epoch(self, branch: Branch) -> None:
        self._epochs += 1
        branch.restart(self._epochs, self._text)
        self._orphans = [task for task in self._orphans if task.drafter != branch.drafter]
        self._workers.advance_epoch(branch.epoch, branch.drafter)

    def _broadcast(self, prompt: tuple[int, ...]) -> None:
        """Has the servers without a task fill their caches with the prompt."""
        if len(prompt) > 1:
            for server in self._servers.idle:
                prefill = Verify(self._next_number(), NEVER_STALE, prompt, len(prompt) + 1)
                self._servers.send(server, prefill)

    def _dispatch(self) -> None:
        """Gives idle servers the tasks that are due."""
        while self._servers.idle:
            task = self._orphans.pop(0) if self._orphans else self._due()
            if task is None:
                return
            self._servers.send(self._servers.nearest(task.drafter, len(self._text)), task)

    def _due(self) -> Verify | None:
        """The task that is due next, of the first branch that has one.

        A task is due when `lookahead` positions are not asked yet, or when the drafter has nothing
        more to add. It is also due when no running task draws the next position to commit: so the
        target never waits for a slow drafter, and DSI is never slower than plain decoding.
        """
        committed = len(self._text)
        if all(branch.asked < committed for branch in self._branches):
            longest = max(self._branches, key=lambda branch: len(branch.tokens))
            return self._next_task(longest, committed - 1, 1)
        for branch in self._branches:
            others = [other for other in self._branches if other is not branch]
            covers = [branch.covered_by(other, committed) for other in others]
            asked = max(branch.asked, committed - 1, *covers)
            ended = len(branch.tokens) >= self._goal - 1
            task = self._next_task(branch, asked, 1 if ended else self._config.lookahead)
            if task is not None:
                return task
        return None

    def _next_task(self, branch: Branch, asked: int, least: int) -> Verify | None:
        """A task for the positions of a branch after `asked`; None if there are fewer than
        `least`."""
        last = len(branch.tokens)
        if last - asked < least:
            return None
        branch.asked = asked + min(last - asked, self._config.max_rows)
        return branch.task(self._next_number(), asked + 1, branch.asked)

    def _next_number(self) -> int:
        self._tasks += 1
        return self._tasks

    def _handle(self, event: Event) -> Commit | None:
        """Applies one event; returns the tokens that it committed, if any."""
        if isinstance(event, Drafted):
            for branch in self._branches:
                branch.extend(event)
        elif isinstance(event, WorkerLost):
            self._lose(event)
        elif (task := self._servers.answered(event)) is not None:
            self.bytes_streamed += event.bytes_streamed
            if isinstance(event, Verified):
                return self._take(event, task)
            if isinstance(event, Failed):
                self._fail(event, task)
        return None

    def _branch_of(self, task: Verify) -> Branch | None:
        """The branch that a task belongs to; None if it is stale or a prefill."""
        return next((branch for branch in self._branches if branch.epoch == task.epoch), None)

    def _take(self, event: Verified, task: Verify) -> Commit | None:
        """Applies the draws of a task; returns the tokens that they committed, if any."""
        branch = self._branch_of(task)
        if branch is not None or task.epoch == NEVER_STALE:
            self._servers.holds(event.server, task)
        if branch is None:
            return None
        branch.draws.update(zip(range(task.first, self._goal), event.draws, strict=False))
        end = task.first + len(event.draws)
        if event.bonus is not None:
            branch.undecided[end] = event.bonus
        elif end <= len(task.tokens) and event.draws == task.tokens[task.first : end]:
            # the draws ended early though no draft was wrong; the rest is asked for again, and
            # this time its first position is drawn or fails
            self._orphan(task.rest(end))
        drafts = max(0, len(task.tokens) - len(self._text))
        committed = self._commit()
        if not committed:
            return None
        tokens, drafted = zip(*committed, strict=True)
        return Commit(tokens, drafted, max(1, event.rows - drafts))

    def _commit(self) -> list[tuple[int, bool]]:
        """Moves draws into the text, in order, up to and including the first that no branch has.

        Branches that have another token at a committed position begin again after the text.

        Returns:
            the tokens, each with whether it was drafted.
        """
        committed = []
        left = self._branches
        while left and len(self._text) < self._goal:
            position = len(self._text)
            token = self._drawn(left, position)
            if token is None:
                break
            self._text.append(token)
            left = [branch for branch in left if branch.goes_on(position, token)]
            committed.append((token, bool(left)))
            for branch in left:
                branch.forget(position)
        for branch in self._branches:
            if branch not in left:
                self._servers.cut_cached(branch.drafter, len(self._text) - 1)
                if len(self._text) < self._goal:
                    self._restart(branch)
        return committed

    def _drawn(self, branches: Sequence[Branch], position: int) -> int | None:
        """The target's token for a position, if a task of these branches has drawn it; with
        rejection sampling it may be decided here."""
        for branch in branches:
            if position in branch.draws:
                return branch.draws[position]
        for branch in branches:
            if position in branch.undecided:
                assert self._judge is not None, "nobody asked for distributions"
                drafted = [other for other in branches if position in other.proposals]
                draft = (
                    (drafted[0].tokens[position], drafted[0].proposals[position])
                    if drafted
                    else None
                )
                return self._judge(branch.undecided[position], draft, position)
        return None

    def _orphan(self, task: Verify) -> None:
        """Has a task sent again, ahead of new ones, unless it is stale."""
        if self._branch_of(task) is not None:
            self._orphans.append(task)
            self._orphans.sort(key=lambda orphan: orphan.first)

    def _fail(self, event: Failed, task: Verify) -> None:
        """Goes on after a task failed and left its server usable.

        Logits that are not finite would be so in every server: the text ends at their position if
        it gets that far. Any other error may be due to this server: another one gets the task, and
        this one gets none until the next text.
        """
        if isinstance(event.error, NonFiniteLogitsError):
            self._take_apart(event.error, task)
            return
        if self._branch_of(task) is None and task.epoch != NEVER_STALE:
            return
        self._servers.rest(event.server, event.error)
        self._orphan(task)
        if left := self._servers.left:
            self._report(
                f"DSI target server {event.server}: {event.error}; {left} go on without it"
            )

    def _take_apart(self, error: NonFiniteLogitsError, task: Verify) -> None:
        """Has the first position of a failed task drawn again, without the drafts after it.

        A draft with values that overflow also spoils the rows before it: attention gives it the
        weight 0, and 0 times infinity is not a number. Plain decoding would never run that draft.
        """
        branch = self._branch_of(task)
        if branch is None:
            return
        if task.first == len(task.tokens):
            branch.undrawable[task.first] = error
            return
        self._orphan(task.head())
        self._orphan(task.rest(task.first + 1))

    def _lose(self, event: WorkerLost) -> None:
        """Goes on without a lost worker; the task that it held is sent again, ahead of new ones."""
        if event.worker <= DRAFTER:
            for branch in self._branches:
                branch.alive = branch.alive and branch.drafter != event.worker
            which = "" if len(self._branches) == 1 else f" {-event.worker}"
            whose = "its drafts" if which else "drafts"
            self._report(
                f"the DSI drafter{which} is lost ({event.reason}); going on without {whose}"
            )
            return
        task = self._servers.lose(event.worker)
        if task is not None:
            self._orphan(task)
        self._report(
            f"DSI target server {event.worker} is lost ({event.reason}); {self._servers.left} left"
        )
