"""Passes that go through several machines in waves: while one machine computes some rows, the next
one computes those before.

A machine is done with a wave when it has handed its rows on, and begins with the next one. A wave
is a pass of its own to every span, behind the rows of the waves before it; it needs no logits. The
last wave takes the rows of all of them to the head. A row has the same bits in every pass, so these
are the rows of one pass.

Source: the micro-batches of GPipe, arXiv:1811.06965, section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specexec_cli.core import Piece
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.pass_context import PassContext
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.spans import OtherMachines, RowsUnderWay
from specexec_cli.planning.hosts import InWaves, TextRows, in_waves

# A long service sees texts side by side with ever other trees.
_KEPT = 1024


class Waves:
    """The passes of a model with layers on other machines, one at a time.

    Args:
        others: the machines.
        divide: the waves in which a pass of these rows is fastest.
        context: of the model, which keeps the rows that a trained head reads.
    Attributes:
        meanwhile: what this machine does once its rows of the next pass are on their way.
    """

    def __init__(
        self,
        others: OtherMachines,
        divide: Callable[[Sequence[TextRows]], InWaves],
        context: PassContext,
    ) -> None:
        self._others, self._context = others, context
        self._divide = lru_cache(_KEPT)(divide)
        # the pass's waves that have begun: their pieces, where they are, and those of their rows in
        # this machine's layers that a trained head reads
        self._begun: list[tuple[Sequence[Piece], RowsUnderWay, dict[int, Tensor]]] = []
        # the wave that is in this machine's layers: its pieces, their rows, and for each passage
        # and each piece what stands for its text's rows there
        self._now: tuple[Sequence[Piece], Sequence[PassRows], Sequence[Sequence[Any]]] = (), (), ()
        self._last = True  # whether that is the pass's last
        self.meanwhile: Callable[[], None] | None = None

    def of_pass(self, parts: Sequence[PassRows]) -> InWaves:
        """Begins a pass: its rows in waves. `end` comes behind it, whatever happens."""
        texts = tuple((len(rows.tokens), rows.pending) for rows in parts)
        if self._others.as_planned:
            return self._divide(texts)
        return in_waves(texts, sum(rows for rows, _ in texts))

    def begin(
        self, wave: Sequence[Piece], parts: Sequence[PassRows], states: Sequence[ModelState],
        last: bool,
    ) -> None:  # fmt: skip
        """Begins a wave.

        Args:
            wave: its pieces, of the pass's texts.
            parts: the rows of each piece.
            states: of each piece's text.
            last: whether it is the pass's last.
        """
        firsts = [passage.span.start for passage in self._others.passages]
        there = [[state.layers[first] for state in states] for first in firsts]
        self._now, self._last = (wave, parts, there), last

    def through(self, at: int) -> Callable[[Tensor, bool], Tensor | None]:
        """What takes the place of the first layer of span number `at`; see DecoderLayer.elsewhere.

        The first span's sends a wave on its way through all spans, behind the last one it has this
        machine do what there is to do. Of the last wave, each waits until all waves are behind its
        span, and the last span's returns the rows of all of them.
        """

        def through_span(hidden: Tensor, tuples: bool) -> Tensor | None:
            if not at:
                wave, parts, there = self._now
                before = self._begun[-1][1] if self._begun else None
                way = self._others.send(parts, there, hidden, tuples, before)
                self._begun.append((wave, way, self._context.taken_so_far()))
            if not self._last:
                return None
            if self.meanwhile is not None:
                work, self.meanwhile = self.meanwhile, None
                work()
            for _, way, _ in self._begun:
                way.wait(at)
            last_span = at == len(self._others.passages) - 1
            return self._arrived(hidden.device) if last_span else hidden

        return through_span

    def between(self, hidden: Tensor, tuples: bool) -> Tensor | None:
        """What takes the place of all other layers of spans."""
        return hidden if self._last else None

    def _arrived(self, device: torch.device) -> Tensor:
        """The rows of all waves, text by text, (1, rows, hidden) on a device. Those that a trained
        head reads are the context's from here on, and the waves keep none of them."""
        beside = [rows for _, _, rows in self._begun]
        for rows, (_, way, _) in zip(beside, self._begun, strict=True):
            rows.update(way.beside())
        for number in [*beside[0]]:
            self._context.offer(
                number, self._text_by_text([rows.pop(number).to(device) for rows in beside])
            )
        return self._text_by_text([way.rows() for _, way, _ in self._begun]).to(device)

    def _text_by_text(self, of_waves: Sequence[Tensor]) -> Tensor:
        """(1, rows, hidden) of each wave as one, text by text."""
        found = list[tuple[int, int, Tensor]]()
        for (pieces, _, _), rows in zip(self._begun, of_waves, strict=True):
            parts = torch.split(rows, [piece.count for piece in pieces], dim=1)
            found += [
                (piece.text, piece.start, part) for piece, part in zip(pieces, parts, strict=True)
            ]
        if len(found) == 1:  # and no copy of it
            return found[0][2]
        in_order = sorted(found, key=lambda each: each[:2])
        return torch.cat([part for _, _, part in in_order], dim=1)

    def end(self) -> None:
        """Ends the pass: nobody waits for rows that are still under way.

        The last wave first: none is to reach a machine that did not get those before it.
        """
        for _, way, _ in reversed(self._begun):
            way.give_up()
        self._begun, self._now, self.meanwhile = [], ((), (), ()), None
