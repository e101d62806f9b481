"""The copier under a virtual clock: right whatever happens in whatever order, and never idle."""

from __future__ import annotations

import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import Tensor
from virtual_copies import WIDE, Mix, outcome
from virtual_time import DeadlockError, Hardware, VirtualTime, virtual_time

from specexec_cli.config import Tier
from specexec_cli.errors import StreamError
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.copier import Copier
from specexec_cli.offload.cuda import DeviceStream
from specexec_cli.offload.slabs import IN_FLIGHT, SWITCH_S

PIECE = 8192
RATE = 1e6  # bytes a second


class Copying(RuleBasedStateMachine):
    """Passes, drafts, aborts and faults, in any order; threads take turns as a seed says."""

    @initialize(
        layers=st.lists(
            st.tuples(st.sampled_from(["resident", "ram", "ssd"]), st.integers(0, 60_000)),
            min_size=1, max_size=6,
        ),
        device_buffers=st.integers(2, 4),
        host_buffers=st.integers(1, 3),
        pins=st.sampled_from([0, 3, 5, 12, 1000]),
        ssd_rate=st.sampled_from([RATE / 8, RATE, 8 * RATE]),
        seed=st.integers(0, 1 << 30),
    )  # fmt: skip
    def open(
        self,
        layers: list[tuple[Tier, int]],
        device_buffers: int,
        host_buffers: int,
        pins: int,
        ssd_rate: float,
        seed: int,
    ) -> None:
        self.threads = set(threading.enumerate())
        self.folder = tempfile.TemporaryDirectory()
        total = sum(size for _, size in layers)
        contents = torch.randint(0, 256, (total,), dtype=torch.uint8)
        path = Path(self.folder.name) / "weights"
        path.write_bytes(contents.numpy().tobytes())
        hardware = Hardware(
            link_bytes_per_s=RATE, ssd_bytes_per_s=ssd_rate, memcpy_bytes_per_s=RATE / 2,
            pins_bytes=pins * PIECE,
        )  # fmt: skip
        self.clock = virtual_time(hardware, seed)
        self.device = self.clock.__enter__()
        self.expected: list[Tensor] = []
        ranges, start = [], 0
        for number, (_, size) in enumerate(layers):
            self.expected.append(contents[start : start + size])
            ranges.append([TensorRange(f"{number}", path, "U8", (size,), start, start + size)])
            start += size
        self.stream = DeviceStream(
            ranges, [tier for tier, _ in layers], self.device, host_buffers=host_buffers,
            device_buffers=device_buffers, piece_bytes=PIECE,
        )  # fmt: skip
        self.broken = False

    @rule(layer_s=st.sampled_from([0.0, 0.003, 0.1]), share=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def run_a_pass(self, layer_s: float, share: float) -> None:
        """To its end, or aborted inside a layer."""
        last = round(share * len(self.expected))
        try:
            for index in range(len(self.expected)):
                with self.stream.layer(index) as tensors:
                    if index == last:
                        raise ZeroDivisionError
                    self.compute(layer_s, tensors[f"{index}"], self.expected[index])
        except ZeroDivisionError:
            self.stream.restart()
        except StreamError:
            if not self.broken:
                raise
            self.stream.restart()

    def compute(self, seconds: float, given: Tensor, expected: Tensor) -> None:
        def check() -> None:
            assert torch.equal(given, expected), "a layer is not what the file has"

        self.device.compute(seconds, check)

    @rule(steps=st.integers(1, 4), step_s=st.sampled_from([0.001, 0.02]))
    def draft(self, steps: int, step_s: float) -> None:
        for _ in range(steps):
            self.device.upload()
            self.device.compute(step_s)
            self.device.wait(self.device.compute_mark())
            self.device.python(0.001)

    @rule()
    def restart(self) -> None:
        """Between two passes, where nothing has to be begun again."""
        self.stream.restart()

    @rule(after=st.integers(0, 30), reading=st.booleans())
    def let_something_fail(self, after: int, reading: bool) -> None:
        setattr(self.device, "fail_read" if reading else "fail_copy", after)
        self.broken = True

    def teardown(self) -> None:
        self.device.fail_read = self.device.fail_copy = -1
        self.stream.close()
        self.stream.close()
        longest = IN_FLIGHT * (PIECE / RATE + self.device.hardware.copy_overhead_s)
        assert max(self.device.upload_delays_s, default=0.0) <= longest + 1e-9
        self.clock.__exit__(None, None, None)
        self.folder.cleanup()
        assert set(threading.enumerate()) <= self.threads


Copying.TestCase.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)
TestCopying: Any = Copying.TestCase


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("ssd", [0, 5, 10])
def test_the_link_is_hardly_ever_idle_and_uploads_hardly_wait(ssd: int, seed: int) -> None:
    """A 70B in GPTQ at 25 GB/s with a 7B draft in 4 bits, and a ring for what a draft takes."""
    found = outcome(replace(WIDE, ssd=ssd, seed=seed), iterations=2)
    assert found.idle_share < 0.05
    assert found.upload_s < 0.002


def test_a_short_ring_is_full_while_the_drafter_works_and_no_slower() -> None:
    """What is not in the ring stays on the device instead: as much is not moved."""
    short, wide = outcome(Mix(), iterations=2), outcome(WIDE, iterations=2)
    assert 0.05 < short.idle_share < Mix().full_s / short.iteration_s + 0.05
    assert abs(short.iteration_s / wide.iteration_s - 1) < 0.01


def test_whole_layers_in_one_copy_would_keep_uploads_waiting() -> None:
    """The clock sees what pieces are for."""
    assert outcome(replace(WIDE, piece_blocks=26), iterations=1).upload_s > 0.01


@pytest.mark.parametrize("mix", [replace(WIDE, link_bytes_per_s=12.5e9), WIDE])
def test_steps_wait_for_parts_of_pieces_and_the_link_is_no_more_idle(
    mix: Mix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a tree grows, a piece goes in parts."""
    parts = outcome(mix, iterations=2)
    whole_pieces = property(lambda copier: False, lambda copier, fine: None)
    monkeypatch.setattr(Copier, "fine", whole_pieces, raising=False)
    whole = outcome(mix, iterations=2)
    assert parts.upload_s < whole.upload_s / 2
    assert parts.idle_share < whole.idle_share + 0.005


def test_copies_ask_python_for_the_interpreter_often() -> None:
    before = sys.getswitchinterval()
    try:
        for usual in (5e-3, 1e-4):
            sys.setswitchinterval(usual)
            outcome(Mix(), iterations=1)
            assert sys.getswitchinterval() == pytest.approx(min(usual, SWITCH_S))
    finally:
        sys.setswitchinterval(before)


def test_a_deadlock_is_an_error() -> None:
    time = VirtualTime()
    with pytest.raises(DeadlockError):
        time.block()
