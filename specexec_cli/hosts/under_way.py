"""Rows of a pass on their way through the spans of other machines, while the first one goes on."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from specexec_cli.hosts.joined import ForgottenError, Frame, SpanPassage, SpanWave
from specexec_cli.models.spans import SpanLostError

_LOOK_S = 0.5  # between looks at a machine that may have been let go


class UnderWay:
    """Rows that go through spans one after another; see spans.RowsUnderWay.

    What comes back from one span is handed on to the next in the thread that receives it, and waits
    there behind the rows that were sent before.

    Args:
        passages: the ways to the spans.
        waves: for each, what its machine is told of the rows.
        hidden: (1, rows, hidden) float32.
        before: see OtherMachines.send.
    """

    def __init__(
        self,
        passages: Sequence[SpanPassage],
        waves: Sequence[SpanWave],
        hidden: Tensor,
        before: UnderWay | None = None,
    ) -> None:
        self._before = before
        self._passages, self._waves = passages, waves
        self._changed = threading.Condition()
        self._behind = 0  # spans
        self._rows: Tensor | None = None  # behind the last
        self._beside = dict[int, Tensor]()
        self._error: Exception | None = None
        self._given_up = False
        # here: a thread has streams of its own. And as a copy: the next wave may use its memory
        self._go(hidden.detach().to("cpu", torch.float32, copy=True))

    def wait(self, at: int) -> None:
        """See RowsUnderWay; in short waits, which Ctrl-C can end on every system."""
        with self._changed:
            while self._failure is None and self._behind <= at:
                self._changed.wait(_LOOK_S)
                # also where it waited in vain: an answer may have come while it took the lock again
                if self._failure is None and self._behind <= at:
                    passage = self._passages[self._behind]
                    if passage.joined.ended:  # without an answer, then
                        raise SpanLostError(f"{passage.name} is lost: {passage.joined.lost}")
        if (failure := self._failure) is not None:
            raise failure

    @property
    def _failure(self) -> Exception | None:
        """What these rows failed at, or those before them: a machine that did not get those has no
        use for these, and would have other rows than it is told."""
        return (self._before and self._before._failure) or self._error

    def _is_wanted(self) -> bool:
        return self._failure is None and not self._given_up

    def rows(self) -> Tensor:
        """See RowsUnderWay."""
        assert self._rows is not None, "they were waited for"
        return self._rows

    def beside(self) -> Mapping[int, Tensor]:
        """See RowsUnderWay."""
        found, self._beside = self._beside, {}
        return found

    def give_up(self) -> None:
        """See RowsUnderWay. What has told, waited for or not, that a span has other rows of a text
        than this machine has it drop all."""
        with self._changed:
            if isinstance(self._error, ForgottenError) and not self._given_up:
                self._passages[self._behind].log.forget()
            self._given_up, self._rows, self._beside = True, None, {}

    def _go(self, rows: Tensor) -> None:
        """Sends the rows through the next span."""
        at = self._behind
        then = partial(self._came, rows.shape)
        self._passages[at].begin(self._waves[at], rows, then, self._is_wanted)

    def _came(self, shape: torch.Size, answer: Frame) -> None:
        """Takes the answer of a span, in the thread of its machine."""
        with self._changed:
            if self._given_up:
                return
            try:
                rows, beside = self._passages[self._behind].read(answer, shape)
                self._beside.update(beside)
                if self._behind == len(self._passages) - 1:
                    self._rows = rows
                    self._behind += 1
                else:
                    self._behind += 1
                    self._go(rows)
            except Exception as error:  # whatever it is, whoever waits for the rows is told
                self._error = error
            self._changed.notify_all()
