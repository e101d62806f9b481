"""The messages between the orchestrator and its workers, and the protocol of a pool of workers.

Messages are plain data, so that they can cross threads, processes and machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from specexec_cli.config import SamplingConfig
from specexec_cli.errors import SpecexecError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Worker number of the first drafter. Further drafters count down from it, target servers up from 0.
DRAFTER = -1
NEVER_STALE = -1  # the epoch of a prefill, which never becomes stale


def worker_name(number: int) -> str:
    """A worker's name in messages to the user."""
    if number == DRAFTER:
        return "the drafter"
    return f"target server {number}" if number >= 0 else f"drafter {-number}"


@dataclass(frozen=True, slots=True)
class Configure:
    """To every worker: how the tokens of the next generation are drawn.

    Attributes:
        sampling: of the target's tokens.
        rejection: whether drafters draw tokens for rejection sampling, and send the distributions;
            else they guess with the target's own noise.
        prompt: what the generation goes on from.
    """

    sampling: SamplingConfig
    rejection: bool = False
    prompt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """To every worker: a generation has ended with this text.

    A worker cannot tell it from its tasks, which run beyond it and over drafts that were wrong.
    """

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """To every worker: empty the cache."""


@dataclass(frozen=True, slots=True)
class Score:
    """To any worker: send the model's logits at each position of a text from `first` on."""

    tokens: tuple[int, ...]
    first: int  # at least 1 and below len(tokens)
    number: int = 0  # repeated in the answer, since that of an interrupted request still comes


@dataclass(frozen=True, slots=True)
class Scored:
    """From any worker: logits, (len(tokens) - first, vocab), or why there are none."""

    number: int  # of the Score that this answers
    logits: NDArray[np.float32] | SpecexecError


@dataclass(frozen=True, slots=True)
class Verify:
    """To a target server: draw the target's tokens at positions first .. len(tokens).

    With rejection sampling the draw at a drafted position is the draft if it is kept, and position
    len(tokens) is not drawn: the answer has the target's distribution there, since by then the
    drafter may have drafted that position.

    Attributes:
        task: number of the task.
        epoch: the branch's.
        tokens: the whole sequence (prompt, committed tokens, drafts), so that a server needs no
            history: it keeps the rows of its cache that agree, and runs the missing ones.
        first: first position to draw; len(tokens) + 1 only fills the cache.
        drafter: worker number of the drafter that made the drafts.
        proposals: with rejection sampling, the distributions (vocab,) that the drafts from position
            `first` on were drawn from.
    """

    task: int
    epoch: int
    tokens: tuple[int, ...]
    first: int
    drafter: int = DRAFTER
    proposals: tuple[NDArray[np.float32], ...] = ()

    def head(self) -> Verify:
        """The task for position `first` alone, without any draft."""
        return replace(self, tokens=self.tokens[: self.first], proposals=())

    def rest(self, first: int) -> Verify:
        """The task from a later position on."""
        return replace(self, first=first, proposals=self.proposals[first - self.first :])


@dataclass(frozen=True, slots=True)
class Draft:
    """To a drafter: continue `tokens` with up to `limit` tokens, and send each by itself."""

    epoch: int
    tokens: tuple[int, ...]
    limit: int
    drafter: int = DRAFTER


@dataclass(frozen=True, slots=True)
class Drafted:
    """From a drafter: its token for one position."""

    epoch: int
    position: int
    token: int
    drafter: int = DRAFTER
    # with rejection sampling, the distribution (vocab,) that the token was drawn from
    probs: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """From a target server: the target's draws for positions first, first + 1, ..."""

    server: int
    task: int
    draws: tuple[int, ...]
    seconds: float  # seconds of the pass
    bytes_streamed: int = 0  # bytes that the server streamed for it
    rows: int = 0  # rows of the pass: those that the server's cache lacked
    # the target's distribution at position len(tokens), (vocab,), for rejection sampling
    bonus: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Aborted:
    """From a target server: the task was stale, and its pass was given up."""

    server: int
    task: int
    bytes_streamed: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """From a target server: the task failed; the server is ready for another one."""

    server: int
    task: int
    error: SpecexecError
    bytes_streamed: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """From the pool: a worker is gone and will not answer any more."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker, once: its model is loaded."""

    pass_s: Mapping[int, float]  # rows of a pass -> seconds, as measured
    context_length: int  # most tokens of one sequence


Event = Drafted | Verified | Aborted | Failed | WorkerLost


class Workers(Protocol):
    """A pool of drafters and target servers with a clock, which may be virtual.

    Only `receive` waits.
    """

    @property
    def drafters(self) -> Sequence[int]:
        """Worker numbers of the drafters, in the order in which their drafts are verified; may be
        empty."""
        ...

    @property
    def servers(self) -> Sequence[int]:
        """Worker numbers of the target servers that are alive."""
        ...

    def now(self) -> float:
        """Seconds on the pool's clock."""
        ...

    def verify(self, server: int, message: Verify) -> None:
        """Gives a task to an idle server."""
        ...

    def draft(self, message: Draft) -> None:
        """Sets a drafter to work on a new prefix; has no effect on a lost drafter."""
        ...

    def advance_epoch(self, epoch: int, drafter: int) -> None:
        """Makes work of a drafter's earlier epochs stale; workers end it at their next poll."""
        ...

    def receive(self, timeout_s: float) -> Event | None:
        """Waits for the next event; None when `timeout_s` passed without one."""
        ...

    def drop(self, worker: int) -> None:
        """Stops a worker that hangs; none of its later events is delivered."""
        ...

    def close(self) -> None:
        """Stops every worker and waits until all are gone."""
        ...
