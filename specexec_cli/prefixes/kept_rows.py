"""What has a text's rows that can be kept on disk: a target's caches, or a draft model's."""

from __future__ import annotations

from typing import Protocol

from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.streamed import StreamedModel


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
