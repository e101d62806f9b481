"""The waves of a pass through other machines, as the machines see them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig

from specexec_cli.models.pass_context import PassContext
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.waves import Waves
from specexec_cli.planning.hosts import in_waves

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
