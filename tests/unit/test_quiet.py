"""QuietCheck reports how much of the machine other programs used during a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from busy_machine import Fake
from computer import Computer

from specexec_cli import device
from specexec_cli.quiet import QuietCheck

FOLDER = Path("/models")


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        (Fake(), ""),
        (Fake(others_cores=0.15), ""),  # a browser
        (Fake(others_cores=1.0), "other programs used 50% of the CPU"),
        (Fake(others_cores=30.0, cores=8, all_cores=64), ""),  # they have cores of their own
        (Fake(others_cores=60.0, cores=8, all_cores=64), "other programs used 50% of the CPU"),
        (Fake(thread_share=0.6), "this program waited for a core 40% of the time"),
        (Fake(others_bytes_per_s=1e9), "other programs moved 2.0 GB on the disk"),
        (Fake(others_bytes_per_s=5e7), ""),
    ],
)
def test_what_others_took_is_told(
    machine: Fake, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install(monkeypatch)
    with QuietCheck(FOLDER, computes=True) as check:
        machine.passes(2.0, own_bytes=4_000_000_000)
    check.own_bytes = 4_000_000_000
    assert check.disturbance == told


def test_only_what_is_measured_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may work between two windows; a window that is open already goes on."""
    machine = Fake()
    machine.install(monkeypatch)
    check = QuietCheck()
    for measured_cores, told in ((0.0, ""), (0.2, ""), (1.0, "other programs used 20% of the CPU")):
        machine.others_cores = 2.0
        machine.passes(60.0)
        machine.others_cores = measured_cores
        check.begin()
        machine.passes(1.0)
        check.begin()
        check.pause()
        check.pause()
        assert check.disturbance == told


def test_too_short_a_window_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Fake(others_cores=2.0)
    machine.install(monkeypatch)
    with QuietCheck() as check:
        machine.passes(0.05)
    assert check.disturbance == ""


def test_a_system_that_does_not_tell_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Fake(others_cores=2.0)
    machine.install(monkeypatch)
    machine.tells = False
    with QuietCheck(FOLDER) as check:
        machine.passes(2.0)
    assert check.disturbance == ""


def test_the_systems_own_counts(tmp_path: Path, computer: Computer) -> None:
    """Of /proc/stat user, nice and steal; a program that computes is seen in them."""
    before, until = device.user_seconds(), time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    after = device.user_seconds()
    if before is not None and after is not None:
        assert after - before > 0.1
    text = "cpu  100 20 999 999 999 999 999 3 40 5\ncpu0 1 1 1 1\n"
    place = os.stat(tmp_path).st_dev
    disk = f"/sys/dev/block/{os.major(place)}:{os.minor(place)}/stat"
    computer.files |= {"/proc/stat": text, disk: "1 0 8 0 1 0 16 0 0 0 0\n"}
    assert device.user_seconds() == 123 / os.sysconf("SC_CLK_TCK")
    assert device.disk_bytes(tmp_path) == 24 * 512
    assert device.disk_bytes(tmp_path / "gone") is None
    computer.files |= {"/proc/stat": "", disk: ""}
    assert device.user_seconds() is None
    assert device.disk_bytes(tmp_path) is None
