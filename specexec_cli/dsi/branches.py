"""One drafter's continuation of the committed text, and what the target has said of it so far."""

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

    Position i is asked when a task that draws it has been sent.
    """

    drafter: int
    alive: bool = True  # its drafter
    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    asked: int = 0  # the highest position some task of its own draws
    draws: dict[int, int] = field(default_factory=dict)  # position -> the target's, not committed
    # position -> why no server can draw it
    undrawable: dict[int, SpecexecError] = field(default_factory=dict)
    # for rejection sampling: position -> the target's distribution, of what is not drawn yet
    undecided: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    # likewise: position -> what its draft was drawn from
    proposals: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    def restart(self, epoch: int, text: Sequence[int]) -> None:
        """Begin again behind the committed text; all earlier work for it is stale."""
        self.epoch = epoch
        self.tokens = list(text)
        self.asked = len(text) - 1
        self.draws.clear()
        self.undrawable.clear()
        self.undecided.clear()
        self.proposals.clear()

    def extend(self, drafted: Drafted) -> None:
        """Take one more draft, unless it is of a restart before."""
        if drafted.epoch == self.epoch and drafted.position == len(self.tokens):
            if drafted.probs is not None:
                self.proposals[drafted.position] = drafted.probs
            self.tokens.append(drafted.token)

    def goes_on(self, position: int, token: int) -> bool:
        """Whether it has that very token at a position, and its own tasks say nothing else.

        By rejection sampling two tests of a position may differ; where its own was lost, its tasks
        have drawn nothing behind it.
        """
        drafted = position < len(self.tokens) and self.tokens[position] == token
        return drafted and self.draws.get(position, token) == token

    def forget(self, position: int) -> None:
        """A position has been committed: nothing is asked about it any more."""
        self.draws.pop(position, None)
        self.undecided.pop(position, None)
        self.proposals.pop(position, None)

    def covered_by(self, other: Branch, committed: int) -> int:
        """The highest position that tasks of another branch draw for this one too.

        A draw at a position depends on the tokens before it alone.
        """
        shared = common_prefix(self.tokens[committed:], other.tokens[committed:])
        return min(other.asked, committed + shared)

    def task(self, number: int, first: int, last: int) -> Verify:
        """The task that draws positions first .. last."""
        drafts = range(first, last) if self.proposals else ()
        proposals = tuple(self.proposals[position] for position in drafts)
        return Verify(number, self.epoch, tuple(self.tokens[:last]), first, self.drafter, proposals)
