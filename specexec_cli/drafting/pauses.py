"""When not to draft at all: where plain decoding has turned out to write faster.

Whether trees pay is told by what tokens have cost with them and without. Neither is known before it
was tried, so passes without a tree are tried where the cost model expects them to be faster, and
trees are tried again between ever longer pauses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specexec_cli.core import StepResult

_TRIAL = 8  # iterations with trees before they are judged
_SHORT_TRIAL = 3  # where they are slower by far, or were before
_ONE = 1  # where the cost model expects no better of them either
_SHORTEST, _LONGEST = 8, 128  # passes of a pause
# Trees are given up where tokens come at less than this share of the plain rate, after a trial and
# after a short one.
_MARGIN, _FAR = 0.9, 0.5
# The first tree after a pause pays for what the draft model missed as well; where the cost model
# expects no better of the next ones, it is enough to tell that they come at less than this share.
_RESUMED = 0.7
_DECAY = 0.7


class Pauses:
    """Counts what tokens cost with trees and without, and says when to go without."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # with trees, in this trial
        self._trees = 0  # of this trial
        self._plain_s: float | None = None  # of a pass without a tree, as measured lately
        self._left = 0  # passes of this pause
        self._next = _SHORTEST
        self._resumed = False  # the draft model has the tokens of a pause to catch up on
        self._doubted = False  # the cost model expected the last tree to be slower than none

    def goes_without(self, expected_plain_s: float) -> bool:
        """Whether the next pass goes without a tree.

        Args:
            expected_plain_s: seconds of such a pass by the cost model; used until one was seen.
        """
        if self._left:
            self._left = self._left - 1 if self._slow(expected_plain_s) else 0
            return self._left > 0
        if self._trees < (_ONE if self._doubted else _SHORT_TRIAL):
            return False
        slow_before = self._next > _SHORTEST
        long_enough = self._trees >= _TRIAL or slow_before or self._doubted
        slow = self._slow(expected_plain_s, _MARGIN if long_enough else _FAR)
        self._left = self._next if slow else 0
        self._next = min(2 * self._next, _LONGEST) if slow else _SHORTEST
        if slow:
            self._resumed = True
        return slow

    def observe(self, step: StepResult, tokens: float, doubted: bool) -> None:
        """One iteration; not one that carried a prompt.

        Args:
            tokens: expected of its tree and the bonus token: those that came are a matter of luck.
            doubted: the cost model expected the tree to be slower than none.
        """
        self._doubted = doubted
        seconds = step.draft_s + step.verify_s
        if not step.tree_nodes:
            before = seconds if self._plain_s is None else self._plain_s
            self._plain_s = _DECAY * before + (1.0 - _DECAY) * seconds
        elif self._resumed and not (doubted and self._slower(tokens, seconds, _RESUMED)):
            self._resumed, self._trees = False, 0
            self._tokens = self._seconds = 0.0
        else:
            self._resumed = False
            self._trees += 1
            self._tokens = _DECAY * self._tokens + tokens
            self._seconds = _DECAY * self._seconds + seconds

    def _slow(self, expected_plain_s: float, margin: float = _MARGIN) -> bool:
        """Whether tokens come at less than this share of the plain rate with trees."""
        return self._slower(self._tokens, self._seconds, margin, expected_plain_s)

    def _slower(
        self, tokens: float, seconds: float, share: float, expected_plain_s: float = 0.0
    ) -> bool:
        """Whether so many tokens took longer than this share of the plain rate allows."""
        plain_s = expected_plain_s if self._plain_s is None else self._plain_s
        return tokens * plain_s < share * seconds
