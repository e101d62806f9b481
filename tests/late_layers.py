"""Layers that come late, so that drafting goes on while a pass waits for them."""

from __future__ import annotations

import pytest

from specexec_cli.offload.stream import LayerStream


def layers_come_late(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Each layer comes as much later as so many draft steps take."""
    arrive = LayerStream._wait_for_turn

    def waiting(stream: LayerStream) -> None:
        for _ in range(steps if stream.meanwhile is not None else 0):
            stream.meanwhile()
        arrive(stream)

    monkeypatch.setattr(LayerStream, "_wait_for_turn", waiting)
