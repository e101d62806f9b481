"""Rows under way through spans of other machines, as whoever waits for them sees it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specexec_cli.errors import WorkerError
from specexec_cli.hosts import under_way
from specexec_cli.hosts.joined import SpanOrder, SpanPassage, SpanWave
from specexec_cli.hosts.messages import body_of
from specexec_cli.hosts.under_way import UnderWay
from specexec_cli.planning.memory import Work


class SlowToRead:
    """A span whose answer comes while it is waited for, and takes longer to read than a look."""

    name, joined = "host-0", SimpleNamespace(ended=False, lost=None)

    def begin(self, wave: SpanWave, rows: torch.Tensor, then: Any, wanted: Any) -> None:
        assert wanted(), "the pass waits for it"
        self.rows = rows
        threading.Timer(0.1, then, [({}, bytearray())]).start()

    def read(self, answer: Any, shape: torch.Size) -> tuple[torch.Tensor, dict[int, Any]]:
        time.sleep(0.6)
        return self.rows, {}


def test_an_answer_may_be_read_for_longer_than_between_two_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(under_way, "_LOOK_S", 0.3)
    rows = torch.arange(8.0).reshape(1, 2, 4)
    way = UnderWay([SlowToRead()], [SpanWave(1, (), False)], rows)
    way.wait(0)
    assert torch.equal(way.rows(), rows)


def test_what_a_head_reads_comes_behind_the_rows_and_of_no_other_length() -> None:
    machine = SimpleNamespace(ram_bytes=1, vram_bytes=0)
    plan: Any = SimpleNamespace(
        work=Work(features=(2, 3)), peak_ram_bytes=1, peak_vram_bytes=0, streams=False
    )
    planned: Any = SimpleNamespace(
        layers=range(1, 4), plan=plan, host=SimpleNamespace(name="attic", machine=machine)
    )
    work = {"features": (1, 2, 3, 4)}
    order = SpanOrder(dtype="bfloat16", eight_bit_rows=False, work=work, digest="")
    joined: Any = SimpleNamespace(name="attic", check=lambda head: None)
    passage = SpanPassage(planned, order, joined)
    rows = torch.arange(8.0).reshape(1, 2, 4)
    beside = [(rows + number).bfloat16() for number in (10, 20)]
    body, head = bytearray(b"".join(body_of(rows, beside))), {"kind": "rows", "shape": [1, 2, 4]}
    found, of_layers = passage.read((head, body), rows.shape)
    assert torch.equal(found, rows)
    assert [*of_layers] == [2, 3, 4]
    beside.append(rows.bfloat16())  # in front of the next span's first layer
    assert all(torch.equal(*each) for each in zip(of_layers.values(), beside, strict=True))
    for other in (body[:-16], body + bytes(16), body[:32], body[:16]):
        with pytest.raises(WorkerError, match="attic"):
            passage.read((head, other), rows.shape)
