"""The two loops a worker runs, whatever its model and wherever it is.

A worker knows its model through TargetServer or DraftServer and its pool through an inbox, an
outbox and the epoch; whether it is a thread or a process is not its business.
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

Order = Verify | Draft | Configure | Forget | Score
Stale = Callable[[], bool]
Epoch = Callable[[int], int]  # drafter -> the epoch of the work for its drafts that is not stale
Message = TypeVar("Message", covariant=True)


class ModelServer(Protocol):
    """What every worker's model does."""

    def ready(self) -> Ready:
        """What the pool must know before the first order."""
        ...

    def configure(self, sampling: SamplingConfig, rejection: bool = False) -> None:
        """Draw, or guess at, the tokens of later orders by `sampling`; see messages.Configure."""
        ...

    def forget(self) -> None:
        """Empty the cache."""
        ...

    def score(self, tokens: Sequence[int], first: int) -> NDArray[np.float32]:
        """Logits for each position of a text from `first` on, (len(tokens) - first, vocab)."""
        ...


class TargetServer(ModelServer, Protocol):
    """One instance of the target with a KV cache of its own."""

    @property
    def bytes_streamed(self) -> int:
        """Bytes that came over the link so far."""
        ...

    @property
    def rows_run(self) -> int:
        """Rows that were run through the model so far."""
        ...

    @property
    def bonus(self) -> NDArray[np.float32] | None:
        """The target's distribution at position len(tokens) of the last verification, (vocab,).

        None unless `configure` asked for rejection sampling and every draft was kept.
        """
        ...

    def verify(
        self,
        tokens: Sequence[int],
        first: int,
        stale: Stale,
        proposals: Sequence[NDArray[np.float32]] = (),
    ) -> tuple[int, ...] | None:
        """Draw the target's tokens at positions first .. len(tokens) after `tokens`.

        Where `configure` asked for rejection sampling, draws end in front of position len(tokens).
        Proposals: see messages.Verify.

        The cache keeps the longest common prefix of what it holds and `tokens`. `stale` is
        polled between layers; once it is true the pass is given up, the cache holds at most the
        common prefix, and the answer is None. Draws may end early: behind the first that
        differs from `tokens`, since nothing behind it is of use, and in front of a position that
        cannot be drawn.

        Raises:
            NonFiniteLogitsError: position `first` cannot be drawn.
            SpecexecError: the pass failed; the cache holds at most the common prefix.
        """
        ...


class DraftServer(ModelServer, Protocol):
    """The draft model with its KV cache."""

    def start(self, tokens: Sequence[int]) -> None:
        """Continue after `tokens`, keeping the cached rows that agree."""
        ...

    def next_token(self) -> int | None:
        """Draft one more token; None where this text gets no more of them."""
        ...

    @property
    def proposal(self) -> NDArray[np.float32] | None:
        """What the last token was drawn from, (vocab,); None where it is a guess at the target's.

        It is told where `configure` asked for rejection sampling.
        """
        ...


class Outbox(Protocol):
    """Where a worker puts what it has to tell."""

    def put(self, event: Event | Scored) -> None:
        """Send one event to the pool."""
        ...


class Inbox(Protocol[Message]):
    """Where a worker's orders come from; None ends the worker."""

    def get(self) -> Message | None:
        """Wait for the next order."""
        ...


def run_task(
    server: TargetServer, number: int, task: Verify, epoch: Epoch
) -> Verified | Aborted | Failed:
    """One verification task, from the stale check to its answer."""

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
    """Draft, token after token, until the limit, the drafter's end, or a new epoch."""
    if order.epoch != epoch(order.drafter):
        return
    server.start(order.tokens)
    for position in range(len(order.tokens), len(order.tokens) + order.limit):
        token = server.next_token()
        if token is None or order.epoch != epoch(order.drafter):
            return
        yield Drafted(order.epoch, position, token, order.drafter, server.proposal)


def run_score(server: ModelServer, order: Score) -> Scored:
    """The logits of a text, or why there are none."""
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
    """Answer verification tasks until the inbox says None."""
    while (order := inbox.get()) is not None:
        if isinstance(order, Verify):
            outbox.put(run_task(server, number, order, epoch))
        else:
            _serve_any(server, order, outbox)


def serve_drafter(server: DraftServer, inbox: Inbox[Order], outbox: Outbox, epoch: Epoch) -> None:
    """Draft what is ordered until the inbox says None."""
    while (order := inbox.get()) is not None:
        if isinstance(order, Draft):
            for drafted in run_draft(server, order, epoch):
                outbox.put(drafted)
        else:
            _serve_any(server, order, outbox)


def _serve_any(server: ModelServer, order: Order, outbox: Outbox) -> None:
    """The orders that every worker takes."""
    if isinstance(order, Configure):
        server.configure(order.sampling, order.rejection)
    elif isinstance(order, Forget):
        server.forget()
    elif isinstance(order, Score):
        outbox.put(run_score(server, order))
    else:
        raise AssertionError(f"{type(order).__name__} came to the wrong worker")
