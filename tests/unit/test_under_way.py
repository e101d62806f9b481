"""Rows under way through spans of other machines, as whoever waits for them sees it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specexec_cli.hosts import under_way
from specexec_cli.hosts.joined import SpanWave
from specexec_cli.hosts.under_way import UnderWay


class SlowToRead:
    """A span whose answer comes while it is waited for, and takes longer to read than a look."""

    name, joined = "host-0", SimpleNamespace(ended=False, lost=None)

    def begin(self, wave: SpanWave, rows: torch.Tensor, then: Any, wanted: Any) -> None:
        assert wanted(), "the pass waits for it"
        self.rows = rows
        threading.Timer(0.1, then, [({}, bytearray())]).start()

    def read(self, answer: Any, shape: torch.Size) -> torch.Tensor:
        time.sleep(0.6)
        return self.rows


def test_an_answer_may_be_read_for_longer_than_between_two_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(under_way, "_LOOK_S", 0.3)
    rows = torch.arange(8.0).reshape(1, 2, 4)
    way = UnderWay([SlowToRead()], [SpanWave(1, (), False)], rows)
    way.wait(0)
    assert torch.equal(way.rows(), rows)
