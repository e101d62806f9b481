"""Decides when not to draft: while plain decoding is measured to be faster.

Trees are judged by the seconds per token with them and without. Neither is known before it is
tried. So trees are judged after a trial, against the cost model's estimate of a plain pass; during
a pause plain passes are measured; and after each pause, which grow longer, trees are tried again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specexec_cli.core import StepResult

_TRIAL = 8  # iterations with trees before they are judged
_SHORT_TRIAL = 3  # the same if trees are far slower, or were slow in the last trial
_ONE = 1  # the same if the cost model expects the trees to be slower too
_SHORTEST, _LONGEST = 8, 128  # passes of a pause; each pause is twice as long as the last
# A pause begins if the rate of tokens with trees is below this share of the plain rate: after a
# trial, and after a short one.
_MARGIN, _FAR = 0.9, 0.5
# The first tree after a pause is not counted, since the draft model has to catch up then. It does
# count if the cost model expects trees to be slower, and its rate is below this share of the plain.
_RESUMED = 0.7
_DECAY = 0.7  # of the sums over a trial, and of a plain pass's seconds, per iteration


class Pauses:
    """Measures the seconds of tokens with trees and without, and says when to go without."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # tokens and seconds with trees, in this trial
        self._trees = 0  # trees of this trial
        self._plain_s: float | None = None  # recent seconds of a pass without a tree
        self._left = 0  # passes left of this pause
        self._next = _SHORTEST  # passes of the next pause
        self._resumed = False  # whether the next tree is the first one after a pause
        self._doubted = False  # whether the cost model expected no gain of the last tree

    def goes_without(self, expected_plain_s: float) -> bool:
        """Whether the next pass goes without a tree.

        Args:
            expected_plain_s: seconds of such a pass by the cost model; used until one was measured.
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
        """Learns from one iteration, which must not have carried a prompt.

        Args:
            step: the iteration.
            tokens: expected tokens of its tree and the bonus token. Those that really came vary too
                much by chance.
            doubted: whether the cost model expected the tree to be slower than none.
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
        """Whether this trial's rate of tokens is below this share of the plain rate."""
        return self._slower(self._tokens, self._seconds, margin, expected_plain_s)

    def _slower(
        self, tokens: float, seconds: float, share: float, expected_plain_s: float = 0.0
    ) -> bool:
        """Whether the rate of `tokens` in `seconds` is below this share of the plain rate."""
        plain_s = expected_plain_s if self._plain_s is None else self._plain_s
        return tokens * plain_s < share * seconds
