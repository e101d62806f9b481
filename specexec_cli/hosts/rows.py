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

    Attributes:
        opened: how often the span has been opened; rows of earlier times are gone.
    """

    def __init__(self) -> None:
        self.opened = 0
        self._done: deque[Sequence[Any]] = deque()  # appended to by finalizers, in any thread

    def add(self, *what: Any) -> None:
        """Notes what was done, to be told with the next pass."""
        self._done.append(what)

    def take(self) -> list[Sequence[Any]]:
        """All that was noted, which is then forgotten."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def reopened(self) -> None:
        """Begins anew, as the span that was opened again does."""
        self.opened += 1
        self.take()


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

    def _note(self, what: str, *values: int) -> None:
        if not self.length and what == "crop":
            self._of = self._log.opened  # as new: nothing is lost any more
        if self._of == self._log.opened:
            self._log.add(what, self.number, *values)
