"""When not to draft at all: where plain decoding has turned out to write faster.

Whether trees pay is told by what tokens have cost with them and without. Neither is known before it
was tried, so passes without a tree are tried where the cost model expects them to be faster, and
trees are tried again between ever longer rests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specexec_cli.core import StepResult

_TRIAL = 8  # iterations with trees before they are judged
_SHORT_TRIAL = 3  # where they are slower by far, or were before
_ONE = 1  # where the cost model expects no better of them either
_SHORTEST, _LONGEST = 8, 128  # passes of a rest
# Trees are given up where tokens come at less than this share of the plain rate, after a trial and
# after a short one.
_MARGIN, _FAR = 0.9, 0.5
# And where they have come at less than this share for long, if they do not come faster now: a few
# trees cannot tell a loss of some percent from luck, many can.
_CLOSE, _MANY = 0.98, 24
_DECAY, _SLOW_DECAY = 0.7, 0.97


class Rests:
    """Counts what tokens cost with trees and without, and says when to go without."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # with trees, in this trial
        self._all_tokens = self._all_seconds = 0.0  # with trees, in all of them
        self._all_trees = 0
        self._trees = 0  # of this trial
        self._plain_s: float | None = None  # of a pass without a tree, as measured lately
        self._left = 0  # passes of this rest
        self._next = _SHORTEST
        self._woke = False  # the draft model has the tokens of a rest to catch up on
        self._doubted = False  # the cost model expected the last tree to be slower than none

    def rests(self, expected_plain_s: float) -> bool:
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
        slow |= self._slow_for_long(expected_plain_s)
        self._left = self._next if slow else 0
        self._next = min(2 * self._next, _LONGEST) if slow else _SHORTEST
        if slow:
            self._woke = True
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
        elif self._woke:
            self._woke, self._trees = False, 0
            self._tokens = self._seconds = 0.0
        else:
            self._trees += 1
            self._tokens = _DECAY * self._tokens + tokens
            self._seconds = _DECAY * self._seconds + seconds
            self._all_trees += 1
            self._all_tokens = _SLOW_DECAY * self._all_tokens + tokens
            self._all_seconds = _SLOW_DECAY * self._all_seconds + seconds

    def _slow(self, expected_plain_s: float, margin: float = _MARGIN) -> bool:
        """Whether tokens come at less than this share of the plain rate with trees."""
        plain_s = expected_plain_s if self._plain_s is None else self._plain_s
        return self._tokens * plain_s < margin * self._seconds

    def _slow_for_long(self, expected_plain_s: float) -> bool:
        """Whether many trees came to less than plain decoding, and the last ones do not deny it."""
        plain_s = expected_plain_s if self._plain_s is None else self._plain_s
        many = self._all_trees >= _MANY and self._all_tokens * plain_s < _CLOSE * self._all_seconds
        return many and self._slow(expected_plain_s, 1.0)
