"""What has a text's rows that can be kept on disk: a target's caches, a draft model's, or a span of
layers on another machine; and what the first machine asks of those."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.prefixes.segments import Segment


class KeptRows(Protocol):
    """A text's rows on one model: a LocalTarget, or a draft model's DraftRows."""

    tokens: list[int]  # committed tokens with rows
    cuts: int  # how often rows of committed tokens were dropped, counted before they are

    @property
    def model(self) -> StreamedModel:
        """The model."""

    @property
    def state(self) -> ModelState:
        """The rows of the committed tokens, and perhaps others behind them."""

    def crop(self, length: int) -> None:
        """Forgets every committed token from `length` on, and perhaps some before."""

    def keep_at(self, length: int) -> None:
        """See ModelState."""


class ReadingElsewhere(Protocol):
    """Segments that other machines read."""

    def wait(self, no_more: Callable[[], bool]) -> None:
        """Waits until all have read them.

        Args:
            no_more: whether nobody wants them any longer.
        Raises:
            UnreadError: a machine cannot use a file, or is gone, or nobody wants them.
        """


class OtherKeepers(Protocol):
    """Other machines with layers, each of which keeps the rows of its own.

    `layers` are those of a text's state, in which each span has its place.
    """

    @property
    def keep_rows(self) -> bool:
        """Whether all of them keep rows, of the same bits as when the session began."""

    def usable(
        self, layers: Sequence[Any], names: Collection[str], no_more: Callable[[], bool]
    ) -> set[str]:
        """Which of these segments all of them have on disk; none if one is gone.

        Args:
            no_more: whether nobody waits for it any longer; none, then.
        """

    def begin_reading(
        self, layers: Sequence[Any], tokens: Sequence[int], segments: Sequence[Segment]
    ) -> ReadingElsewhere:
        """Has them read segments of a text.

        Args:
            tokens: of the text up to the last segment's end.
        """

    def keep(self, layers: Sequence[Any], segment: Segment) -> None:
        """Has them write a segment, with what they are told next."""

    def tell(self) -> None:
        """Tells them now what is to be written, and not with the next pass."""

    def flush(self, most_s: float) -> None:
        """Waits until they have written what they were told, but no longer than `most_s` s."""
