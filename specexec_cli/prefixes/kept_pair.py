"""Kept texts of a target and, where that pays, of its draft model.

A draft model reads a prompt much faster than its target, but not for nothing: on a CPU 8,000 tokens
are minutes of arithmetic even for one of a billion weights, and a second to read from the disk. On
a GPU they are less than a second of arithmetic, so there only the target's rows are kept. Rows of a
window that has moved follow from no beginning of the text, and are not kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait

from specexec_cli.core import common_prefix
from specexec_cli.drafting.draft_rows import DraftRows
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.prefixes.kept_texts import LAST_WRITES_S, KeptTexts
from specexec_cli.verify.verifier import LocalTarget


class KeptPair:
    """Brings rows of both models back before a text begins, and keeps new ones.

    Args:
        target: keeps the target's rows.
        draft: keeps the draft model's; None if they are not kept.
    """

    def __init__(self, target: KeptTexts, draft: KeptTexts | None = None) -> None:
        self._target = target
        self._draft = draft

    def keep_beginnings_alone(self) -> None:
        """See KeptTexts.keep_beginnings_alone."""
        for kept in (self._target, self._draft):
            if kept is not None:
                kept.keep_beginnings_alone()

    def bring_back(self, target: LocalTarget, drafter: object, prompt: Sequence[int]) -> None:
        """See KeptTexts.bring_back.

        Args:
            drafter: the text's; only a draft model has rows.
        """
        self._target.bring_back(target, prompt)
        if self._draft is not None and (rows := _rows_of(drafter)) is not None:
            rows.crop(common_prefix(rows.tokens, prompt[:-1]))
            if len(prompt) <= rows.window and not rows.without_row:
                self._draft.bring_back(rows, prompt)

    def stop_reading(self, reading: Future[None]) -> None:
        """Ends a `bring_back` that another thread has begun; returns once it has ended."""
        both = [kept for kept in (self._target, self._draft) if kept is not None]
        for kept in both:
            kept.read_no_more.set()
        wait([reading])
        for kept in both:
            kept.read_no_more.clear()

    def offer(self, target: LocalTarget, drafter: object, *, ended: bool = False) -> None:
        """See KeptTexts.offer."""
        self._target.offer(target, ended=ended)
        rows = _rows_of(drafter)
        if self._draft is not None and rows is not None and not rows.without_row:
            self._draft.offer(rows, ended=ended)

    def close(self) -> None:
        """See KeptTexts.close; both models' rows are written meanwhile."""
        ends_s = time.monotonic() + LAST_WRITES_S
        try:
            self._target.close()
        finally:
            if self._draft is not None:
                self._draft.close(max(0.0, ends_s - time.monotonic()))


def _rows_of(drafter: object) -> DraftRows | None:
    return drafter.rows if isinstance(drafter, ModelDrafter) else None
