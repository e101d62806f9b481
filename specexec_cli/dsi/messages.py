"""What the orchestrator and its workers tell each other.

Plain data, so the same messages cross threads, processes and machines. A message knows no model.
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

DRAFTER = -1  # the first drafter's worker number, further ones go down; target servers from 0 up
NEVER_STALE = -1  # epoch of a prefill: its rows stay valid whatever is rejected meanwhile


def worker_name(number: int) -> str:
    """What a worker is called in front of the user."""
    if number == DRAFTER:
        return "the drafter"
    return f"target server {number}" if number >= 0 else f"drafter {-number}"


@dataclass(frozen=True, slots=True)
class Configure:
    """To every worker: how the tokens of the next generation are drawn.

    rejection: drafters draw by themselves and tell from what, for rejection sampling; else they
    guess with the target's own noise.
    """

    sampling: SamplingConfig
    rejection: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """To every worker: empty the cache."""


@dataclass(frozen=True, slots=True)
class Score:
    """To any worker: what its model predicts at each position of a text from `first` on."""

    tokens: tuple[int, ...]
    first: int  # at least 1 and below len(tokens)
    number: int = 0  # repeated by its answer: of one that is interrupted, the answer still comes


@dataclass(frozen=True, slots=True)
class Scored:
    """From any worker: logits, (len(tokens) - first, vocab), or why there are none."""

    number: int  # the Score's
    logits: NDArray[np.float32] | SpecexecError


@dataclass(frozen=True, slots=True)
class Verify:
    """To a target server: draw the tokens at positions first .. len(tokens).

    `tokens` is the whole sequence (prompt, committed, drafts), so a server needs no history of
    its own: it keeps the rows of its cache that agree and runs the missing ones. With
    first = len(tokens) + 1 no draw is wanted: the task only fills the cache.

    For rejection sampling, proposals are what the drafts from position first on were drawn from,
    (vocab,) each, and a draw there is the draft, if it is kept. The drafter may have drafted
    position len(tokens) by the time of the answer, which tells the distribution there.
    """

    task: int
    epoch: int  # of that drafter
    tokens: tuple[int, ...]
    first: int
    drafter: int = DRAFTER  # whose drafts these are
    proposals: tuple[NDArray[np.float32], ...] = ()

    def head(self) -> Verify:
        """The same for its first position alone, without any draft."""
        return replace(self, tokens=self.tokens[: self.first], proposals=())

    def rest(self, first: int) -> Verify:
        """The same from a later position on."""
        return replace(self, first=first, proposals=self.proposals[first - self.first :])


@dataclass(frozen=True, slots=True)
class Draft:
    """To the drafter: continue `tokens` with up to `limit` tokens, one message for each."""

    epoch: int
    tokens: tuple[int, ...]
    limit: int
    drafter: int = DRAFTER


@dataclass(frozen=True, slots=True)
class Drafted:
    """From the drafter: its token for one position."""

    epoch: int
    position: int
    token: int
    drafter: int = DRAFTER
    probs: NDArray[np.float32] | None = None  # (vocab,) that it was drawn from, where that matters


@dataclass(frozen=True, slots=True)
class Verified:
    """From a target server: the target's draws for positions first, first + 1, ..."""

    server: int
    task: int
    draws: tuple[int, ...]
    seconds: float  # time the pass took
    bytes_streamed: int = 0  # by the server for it
    rows: int = 0  # of the pass: what the server's cache did not hold yet
    # the target's distribution at position len(tokens), (vocab,), for rejection sampling
    bonus: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Aborted:
    """From a target server: the task was stale, its pass was given up."""

    server: int
    task: int
    bytes_streamed: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """From a target server: the task cannot be done; the server is ready for another one."""

    server: int
    task: int
    error: SpecexecError
    bytes_streamed: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """From the pool: a worker is gone and will not answer."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker, once: its model is loaded."""

    pass_s: Mapping[int, float]  # rows of a pass -> seconds, as measured
    context_length: int  # most tokens of one sequence


Event = Drafted | Verified | Aborted | Failed | WorkerLost


class Workers(Protocol):
    """A pool of drafters and target servers, under a clock of its own.

    The clock may be virtual: nothing here sleeps except receive().
    """

    @property
    def drafters(self) -> Sequence[int]:
        """Numbers of the drafters, the one whose drafts go first in front; may be empty."""
        ...

    @property
    def servers(self) -> Sequence[int]:
        """Numbers of the target servers that are alive."""
        ...

    def now(self) -> float:
        """Seconds on the pool's clock."""
        ...

    def verify(self, server: int, message: Verify) -> None:
        """Hand a task to an idle server."""
        ...

    def draft(self, message: Draft) -> None:
        """Set a drafter to work on a new prefix; a lost drafter ignores it."""
        ...

    def advance_epoch(self, epoch: int, drafter: int) -> None:
        """Make work of a drafter's earlier epochs stale; workers give it up at their next poll."""
        ...

    def receive(self, timeout_s: float) -> Event | None:
        """The next event, or None when `timeout_s` passed without one."""
        ...

    def drop(self, worker: int) -> None:
        """Stop a worker that hangs; none of its later events is delivered."""
        ...

    def close(self) -> None:
        """Stop every worker and wait until all are gone."""
        ...
