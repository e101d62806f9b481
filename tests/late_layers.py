"""Layers that come late, so that drafting goes on while a pass waits for them."""

from __future__ import annotations

import pytest

from specexec_cli.offload.copier import Copier
from specexec_cli.offload.stream import LayerStream


def layers_come_late(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Each layer comes as much later as so many draft steps take, from the disk or over a bus."""
    wait, arrived = LayerStream._wait_for_turn, Copier.arrived
    asked: dict[tuple[Copier, int], int] = {}

    def waiting(stream: LayerStream) -> None:
        for _ in range(steps if stream.meanwhile is not None else 0):
            stream.meanwhile()
        wait(stream)

    def late(copier: Copier) -> bool:
        turn = copier, copier._turn
        asked[turn] = asked.get(turn, 0) + 1
        return asked[turn] > steps and arrived(copier)

    monkeypatch.setattr(LayerStream, "_wait_for_turn", waiting)
    monkeypatch.setattr(Copier, "arrived", late)
