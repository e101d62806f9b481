"""The loops of workers, and the protocols of the models that they serve.

A worker sees its model as a TargetServer or DraftServer, and its pool as an inbox, an outbox and
the epoch. It does not know whether it runs in a thread, a process or an actor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from specexec_cli.config import SamplingConfig
from specexec_cli.dsi.messages import (
    NEVER_STALE,
    Aborted,
    Configure,
    Draft,
    Drafted,
    End,
    Event,
    Failed,
    Forget,
    Ready,
    Score,
    Scored,
    Verified,
    Verify,
)
from specexec_cli.errors import SpecexecError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Order = Verify | Draft | Configure | End | Forget | Score
Stale = Callable[[], bool]
Epoch = Callable[[int], int]  # epoch(drafter) is the drafter's present epoch; others are stale
Message = TypeVar("Message", covariant=True)


class ModelServer(Protocol):
    """What the model of every worker can do."""

    def ready(self) -> Ready:
        """What the pool must know before the first order."""
        ...

    def configure(
        self, sampling: SamplingConfig, rejection: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        """Sets how tokens of later orders are drawn or guessed at; see messages.Configure."""
        ...

    def end(self, tokens: Sequence[int]) -> None:
        """Notes the text that a generation has ended with."""
        ...

    def forget(self) -> None:
        """Empties the cache."""
        ...

    def score(self, tokens: Sequence[int], first: int) -> NDArray[np.float32]:
        """Logits for each position of a text from `first` on, (len(tokens) - first, vocab)."""
        ...

    def close(self) -> None:
        """Ends what the model's worker began besides, such as writing rows to disk."""
        ...


class TargetServer(ModelServer, Protocol):
    """An instance of the target with a cache of its own."""

    @property
    def bytes_streamed(self) -> int:
        """Bytes that were streamed so far."""
        ...

    @property
    def rows_run(self) -> int:
        """Rows that were run through the model so far."""
        ...

    @property
    def bonus(self) -> NDArray[np.float32] | None:
        """The target's distribution (vocab,) at position len(tokens) of the last verification.

        None unless rejection sampling was configured and every draft was kept.
        """
        ...

    def verify(
        self,
        tokens: Sequence[int],
        first: int,
        stale: Stale,
        proposals: Sequence[NDArray[np.float32]] = (),
    ) -> tuple[int, ...] | None:
        """Draws the target's tokens at positions first .. len(tokens).

        The cache keeps the longest common prefix of what it holds and `tokens`.

        Args:
            tokens: the sequence with its drafts.
            first: first position to draw.
            stale: polled between layers; once it is true, the pass is given up.
            proposals: with rejection sampling, the drafts' distributions; see messages.Verify.
        Returns:
            the draws. They end early after the first that differs from `tokens`, since later ones
            are useless, and before a position that cannot be drawn. With rejection sampling they
            end before position len(tokens). None if the pass became stale; the cache then holds at
            most the common prefix.
        Raises:
            NonFiniteLogitsError: position `first` cannot be drawn.
            SpecexecError: the pass failed; the cache holds at most the common prefix.
        """
        ...


class DraftServer(ModelServer, Protocol):
    """A draft model with a cache of its own."""

    def start(self, tokens: Sequence[int]) -> None:
        """Sets the text to continue; cached rows that agree with it are kept."""
        ...

    def next_token(self) -> int | None:
        """Drafts one more token; None if this text gets no more drafts."""
        ...

    @property
    def proposal(self) -> NDArray[np.float32] | None:
        """The distribution (vocab,) that the last token was drawn from; None unless rejection
        sampling was configured."""
        ...


class Outbox(Protocol):
    """Where a worker puts its events."""

    def put(self, event: Event | Scored) -> None:
        """Sends one event to the pool."""
        ...


class Inbox(Protocol[Message]):
    """Where a worker's orders come from."""

    def get(self) -> Message | None:
        """Waits for the next order; None ends the worker."""
        ...


def run_task(
    server: TargetServer, number: int, task: Verify, epoch: Epoch
) -> Verified | Aborted | Failed:
    """Runs one verification task, unless it is stale; returns the answer."""

    def stale() -> bool:
        return task.epoch not in (NEVER_STALE, epoch(task.drafter))

    begin, bytes_before, rows_before = time.perf_counter(), server.bytes_streamed, server.rows_run
    try:
        draws = (
            server.verify(task.tokens, task.first, stale, task.proposals) if not stale() else None
        )
    except SpecexecError as error:
        return Failed(number, task.task, error, server.bytes_streamed - bytes_before)
    streamed = server.bytes_streamed - bytes_before
    if draws is None:
        return Aborted(number, task.task, streamed)
    rows = server.rows_run - rows_before
    seconds = time.perf_counter() - begin
    return Verified(number, task.task, draws, seconds, streamed, rows, server.bonus)


def run_draft(server: DraftServer, order: Draft, epoch: Epoch) -> Iterator[Drafted]:
    """Drafts token after token until the limit, the drafter's end, or a new epoch."""
    if order.epoch != epoch(order.drafter):
        return
    server.start(order.tokens)
    for position in range(len(order.tokens), len(order.tokens) + order.limit):
        token = server.next_token()
        if token is None or order.epoch != epoch(order.drafter):
            return
        yield Drafted(order.epoch, position, token, order.drafter, server.proposal)


def run_score(server: ModelServer, order: Score) -> Scored:
    """Computes the logits of a text; the answer has them, or the error."""
    try:
        return Scored(order.number, server.score(order.tokens, order.first))
    except SpecexecError as error:
        return Scored(order.number, error)


def serve_target(
    server: TargetServer,
    number: int,
    inbox: Inbox[Order],
    outbox: Outbox,
    epoch: Epoch,
) -> None:
    """Answers orders, as target server `number`, until the inbox gives None."""
    while (order := inbox.get()) is not None:
        if isinstance(order, Verify):
            outbox.put(run_task(server, number, order, epoch))
        else:
            _serve_any(server, order, outbox)


def serve_drafter(server: DraftServer, inbox: Inbox[Order], outbox: Outbox, epoch: Epoch) -> None:
    """Answers orders, as a drafter, until the inbox gives None."""
    while (order := inbox.get()) is not None:
        if isinstance(order, Draft):
            for drafted in run_draft(server, order, epoch):
                outbox.put(drafted)
        else:
            _serve_any(server, order, outbox)


def _serve_any(server: ModelServer, order: Order, outbox: Outbox) -> None:
    """Carries out an order that every worker takes."""
    if isinstance(order, Configure):
        server.configure(order.sampling, order.rejection, order.prompt)
    elif isinstance(order, End):
        server.end(order.tokens)
    elif isinstance(order, Forget):
        server.forget()
    elif isinstance(order, Score):
        outbox.put(run_score(server, order))
    else:
        raise AssertionError(f"{type(order).__name__} came to the wrong worker")
