"""The waves of a pass through other machines, as the machines see them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from specexec_cli.hosts.joined import SpanOrder, SpanPassage, SpanWave
from specexec_cli.hosts.messages import body_of
from specexec_cli.hosts.under_way import UnderWay
from specexec_cli.models.pass_context import PassContext
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.waves import Waves
from specexec_cli.planning.hosts import in_waves
from specexec_cli.planning.memory import Work

KEEPS_NONE: Any = PassContext(PretrainedConfig(), torch.device("cpu"), torch.float32)


class Noted:
    """A machine with one span, through which all rows go at once; who was given up is noted."""

    def __init__(self) -> None:
        self.passages, self.as_planned = [SimpleNamespace(span=range(1, 2))], True
        self.ways, self.given_up = list[Any](), list[int]()

    def send(self, parts: Any, rows: Any, hidden: torch.Tensor, tuples: bool, before: Any) -> Any:
        number, there = len(self.ways), hidden.clone()
        self.ways.append(SimpleNamespace(
            wait=lambda at: None, rows=lambda: there, beside=dict,
            give_up=lambda: self.given_up.append(number),
        ))  # fmt: skip
        return self.ways[-1]


class Near:
    """The way to a span whose machine answers at once, and sends three layers' rows for a head."""

    as_planned = True

    def __init__(self) -> None:
        machine = SimpleNamespace(ram_bytes=1, vram_bytes=0)
        plan: Any = SimpleNamespace(
            work=Work(features=(2, 3)), peak_ram_bytes=1, peak_vram_bytes=0, streams=False
        )
        planned: Any = SimpleNamespace(
            layers=range(1, 4), plan=plan, host=SimpleNamespace(name="attic", machine=machine)
        )
        order = SpanOrder(dtype="bfloat16", eight_bit_rows=False, work={"features": (1, 2, 3, 4)},
                          digest="")  # fmt: skip
        self.passages = [SpanPassage(planned, order, self)]  # type: ignore[arg-type]
        self.passages[0].is_open, self.name, self.ended = True, "attic", False

    def begin(self, order: Any, then: Any, more: int) -> None:
        head, (body,) = order()
        rows = torch.frombuffer(bytearray(body), dtype=torch.float32)
        beside = [(rows + number).bfloat16() for number in (10, 20)]
        answer = {"kind": "rows", "shape": head["shape"]}
        then((answer, bytearray(b"".join(body_of(rows, beside)))))

    def check(self, head: Any) -> None:
        """It is what was asked for."""

    def send(self, parts: Any, rows: Any, hidden: torch.Tensor, tuples: bool, before: Any) -> Any:
        return UnderWay(self.passages, [SpanWave(1, (), tuples)], hidden, before)


@pytest.mark.parametrize("count", [1, 4])
def test_a_pass_holds_the_rows_that_a_head_reads_once_before_they_are_side_by_side(
    count: int,
) -> None:
    context: Any = PassContext(PretrainedConfig(), torch.device("cpu"), torch.bfloat16)
    context.take((1, 2, 3, 4))
    rows = PassRows.chain(range(12), 0)
    waves = Waves(Near(), lambda texts: in_waves(texts, -(-12 // count)), context)
    state: Any = SimpleNamespace(layers=[None, SimpleNamespace(number=0)])
    hidden = torch.arange(12 * 67.0).reshape(1, 12, 67)
    whole = waves.of_pass([rows])
    for wave in whole:
        (piece,) = wave
        waves.begin(wave, [rows.part(piece.start, piece.stop)], [state], wave is whole[-1])
        own = hidden[:, piece.start : piece.stop]
        context.offer(1, own)
        found = waves.through(0)(own, False)
    held = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) is torch.Tensor and each.dtype == torch.bfloat16 and each.shape[-1:] == (67,)
    }
    assert sum(held.values()) == 4 * hidden.numel() * 2
    assert torch.equal(found, hidden)
    expected = [hidden, hidden + 10, hidden + 20, hidden]
    assert all(
        torch.equal(one, other.bfloat16())
        for one, other in zip(context.taken(), expected, strict=True)
    )
    waves.end()


def passed(
    machine: Noted, count: int, begun: Callable[[Waves], None] = lambda made: None
) -> torch.Tensor:
    """(1, rows, 1) what a pass of twelve rows, whose numbers they carry, has back."""
    waves, rows = (
        Waves(machine, lambda texts: in_waves(texts, -(-12 // count)), KEEPS_NONE),
        PassRows.chain(range(12), 0),
    )
    begun(waves)
    state: Any = SimpleNamespace(layers=[None, None])
    *before, last = waves.of_pass([rows])
    for wave in [*before, last]:
        (piece,) = wave
        waves.begin(wave, [rows.part(piece.start, piece.stop)], [state], wave is last)
        hidden = torch.arange(piece.start, piece.stop, dtype=torch.float32).reshape(1, -1, 1)
        found = waves.through(0)(hidden, False)
    waves.end()
    assert found is not None
    return found


def test_the_rows_of_a_pass_in_one_wave_are_not_copied() -> None:
    machine = Noted()
    found = passed(machine, 1)
    assert torch.equal(found.flatten(), torch.arange(12.0))
    assert found.data_ptr() == machine.ways[0].rows().data_ptr()


def test_what_there_is_to_do_meanwhile_is_done_once_behind_the_last_wave() -> None:
    machine, done = Noted(), list[int]()

    def begun(made: Waves) -> None:
        made.meanwhile = lambda: done.append(len(machine.ways))

    passed(machine, 4, begun)
    waves = len(machine.ways)
    assert waves > 2
    assert done == [waves]
    passed(machine, 4)
    assert done == [waves]


def test_what_a_failed_pass_left_undone_meanwhile_stays_undone() -> None:
    waves = Waves(Noted(), lambda texts: in_waves(texts, 1), KEEPS_NONE)
    waves.meanwhile = lambda: None
    waves.end()
    assert waves.meanwhile is None


def test_the_waves_of_a_pass_that_ends_are_given_up_from_the_last_on() -> None:
    machine = Noted()
    found = passed(machine, 4)
    assert torch.equal(found.flatten(), torch.arange(12.0))
    assert len(machine.ways) > 2
    assert machine.given_up == [*reversed(range(len(machine.ways)))]
