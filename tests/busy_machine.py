"""A machine of two cores with a clock that a test advances, and programs that use its cores."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from specexec_cli import quiet


@dataclass
class Fake:
    """Stands in for what quiet.py reads from the system."""

    others_cores: float = 0.0  # that other programs keep busy
    thread_share: float = 1.0  # of the time, in which the measuring thread computes
    cores: int = 2  # that this process may use
    all_cores: int = 2
    others_bytes_per_s: float = 0.0
    now_s: float = 0.0
    own_s: float = 0.0  # of user time, by all threads of this process
    others_s: float = 0.0
    disk: float = 0.0  # bytes
    tells: bool = True  # whether it counts what programs take

    def passes(self, seconds: float, own_bytes: int = 0) -> None:
        """Time goes by, in which this process uses all of its cores."""
        self.now_s += seconds
        self.own_s += seconds * self.cores
        self.others_s += seconds * self.others_cores
        self.disk += seconds * self.others_bytes_per_s + own_bytes

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts it in the system's place."""
        clocks = SimpleNamespace(
            perf_counter=lambda: self.now_s, thread_time=lambda: self.thread_share * self.now_s
        )
        times = SimpleNamespace(
            times=lambda: SimpleNamespace(user=self.own_s, children_user=0.0, system=9e9)
        )
        for name, answer in {
            "time": clocks,
            "os": times,
            "user_seconds": lambda: 1e6 + self.own_s + self.others_s if self.tells else None,
            "usable_cores": lambda: self.cores,
            "all_cores": lambda: self.all_cores,
            "disk_bytes": lambda folder: int(self.disk) if self.tells else None,
        }.items():
            monkeypatch.setattr(quiet, name, answer)
