"""A branch: one drafter's continuation of the committed text, and the target's answers on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specexec_cli.core import common_prefix
from specexec_cli.dsi.messages import Drafted, Verify
from specexec_cli.errors import SpecexecError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class Branch:
    """A sequence of tokens: the committed text, then drafts of one drafter.

    A position is asked when a task that draws the target's token there has been sent.

    Attributes:
        drafter: worker number of the drafter.
        alive: whether the drafter is.
        epoch: number of the present speculation; work of earlier ones is stale.
        tokens: the sequence.
        asked: the highest position that a task of this branch draws.
        draws: by position, the target's tokens that are not committed yet.
        undrawable: by position, why no server can draw it.
        undecided: with rejection sampling, by position, the target's distribution (vocab,) where
            nothing is drawn yet.
        proposals: with rejection sampling, by position, the distribution (vocab,) that the draft
            was drawn from.
    """

    drafter: int
    alive: bool = True
    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    asked: int = 0
    draws: dict[int, int] = field(default_factory=dict)
    undrawable: dict[int, SpecexecError] = field(default_factory=dict)
    undecided: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    proposals: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    def restart(self, epoch: int, text: Sequence[int]) -> None:
        """Drops all drafts and begins again after the committed text, in a new epoch."""
        self.epoch = epoch
        self.tokens = list(text)
        self.asked = len(text) - 1
        self.draws.clear()
        self.undrawable.clear()
        self.undecided.clear()
        self.proposals.clear()

    def extend(self, drafted: Drafted) -> None:
        """Appends a draft, unless it is of an earlier epoch."""
        if drafted.epoch == self.epoch and drafted.position == len(self.tokens):
            if drafted.probs is not None:
                self.proposals[drafted.position] = drafted.probs
            self.tokens.append(drafted.token)

    def goes_on(self, position: int, token: int) -> bool:
        """Whether the branch has `token` at a position, and its own tasks drew no other one there.

        With rejection sampling two tests of a position may give different tokens. Where the
        branch's own test was lost, its tasks have drawn nothing after that position.
        """
        drafted = position < len(self.tokens) and self.tokens[position] == token
        return drafted and self.draws.get(position, token) == token

    def forget(self, position: int) -> None:
        """Drops what is known of a position, which has been committed."""
        self.draws.pop(position, None)
        self.undecided.pop(position, None)
        self.proposals.pop(position, None)

    def covered_by(self, other: Branch, committed: int) -> int:
        """The highest position of this branch that tasks of another branch draw.

        A draw depends only on the tokens before it, so tasks of the other branch serve this one as
        far as both have the same tokens.

        Args:
            other: another branch.
            committed: tokens of the committed text.
        """
        shared = common_prefix(self.tokens[committed:], other.tokens[committed:])
        return min(other.asked, committed + shared)

    def task(self, number: int, first: int, last: int) -> Verify:
        """The task that draws positions first .. last."""
        drafts = range(first, last) if self.proposals else ()
        proposals = tuple(self.proposals[position] for position in drafts)
        return Verify(number, self.epoch, tuple(self.tokens[:last]), first, self.drafter, proposals)
