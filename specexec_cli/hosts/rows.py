"""What stands on the first machine for rows that a span on another one keeps."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any, Self

from torch import Tensor

from specexec_cli.models.spans import Elsewhere

_NUMBERS = count()  # of texts, in this process


class SpanLog:
    """What was done to texts since the last pass, which the next one tells the span.

    A pass tells only what was done before it began, however late it is sent: after Ctrl-C it may
    wait behind another one, while texts go on without it.

    Attributes:
        opened: how often the span has been opened; rows of earlier times are gone.
    """

    def __init__(self) -> None:
        self.opened = 0
        self._passes = 0  # that have begun
        # with the passes that had begun by then; appended to by finalizers, in any thread
        self._done: deque[tuple[int, Sequence[Any]]] = deque()

    def add(self, *what: Any) -> None:
        """Notes what was done, to be told with the next pass."""
        self._done.append((self._passes, what))

    def begin(self) -> int:
        """Begins a pass, for which nothing is that is noted from now on; returns its number."""
        self._passes += 1
        return self._passes

    def take(self, number: int) -> list[Sequence[Any]]:
        """All that was noted before a pass began, which is then forgotten."""
        done, found = self._done, []
        while done and done[0][0] < number:
            found.append(done.popleft()[1])
        return found

    def reopened(self) -> None:
        """Begins anew, as the span that was opened again does."""
        self.opened += 1
        self._done = deque()

    def forget(self) -> None:
        """Has the span drop the rows of all texts with the next pass: they are read again."""
        self.reopened()
        self.add("forget")


class SpanRows(Elsewhere):
    """The rows of one text in a span: every change of the state is noted for the span."""

    def __init__(self, log: SpanLog) -> None:
        super().__init__()
        self.number = next(_NUMBERS)
        self._log, self._of = log, log.opened
        weakref.finalize(self, log.add, "drop", self.number)

    @property
    def lost(self) -> bool:  # type: ignore[override]
        """See LayerState."""
        return self.length > 0 and self._of != self._log.opened

    def commit(self, prefix_len: int, slots: Tensor) -> None:
        """See LayerState."""
        super().commit(prefix_len, slots)
        self._log.add("commit", self.number, prefix_len, slots.tolist())

    def crop(self, length: int) -> None:
        """See LayerState."""
        super().crop(length)
        self._note("crop", length)

    def copy(self, other: Self, length: int) -> None:
        """See LayerState."""
        super().copy(other, length)
        self._of = other._of
        self._note("copy", other.number, length)

    def release(self) -> None:
        """See LayerState."""
        super().release()
        self._note("crop", 0)

    def reserve(self, slots: int) -> None:
        """See LayerState."""
        self._note("reserve", slots)

    def keep_at(self, length: int) -> None:
        """See LayerState."""
        self._note("keep_at", length)

    def keep(self, start: int, stop: int, end: int) -> None:
        """Notes that the span's rows of a segment are to be written to its machine's disk.

        Args:
            end: 1 if the state behind the last of them is, too; 0 if not.
        """
        self._note("keep", start, stop, end)

    def _note(self, what: str, *values: int) -> None:
        if not self.length and what == "crop":
            self._of = self._log.opened  # as new: nothing is lost any more
        if self._of == self._log.opened:
            self._log.add(what, self.number, *values)
