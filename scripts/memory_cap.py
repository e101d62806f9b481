"""Run a command under a memory limit: a cgroup (v1 or v2) where allowed, else its address space."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
KIND_VARIABLE = "SPECEXEC_BENCH_CAP"  # tells the command which kind of limit it runs under
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")


@dataclass(frozen=True, slots=True)
class Cgroup:
    folder: Path

    @classmethod
    def create(cls, limit_bytes: int) -> Cgroup | None:
        """Makes a memory cgroup with this limit; None if this user may not."""
        for root, limit_file in (
            (CGROUPS / "memory", "memory.limit_in_bytes"),
            (CGROUPS, "memory.max"),
        ):
            folder = root / f"specexec-bench-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError:
                continue
            try:
                (folder / limit_file).write_text(str(limit_bytes))
            except OSError:  # not a memory controller, or not delegated
                folder.rmdir()
                continue
            with suppress(OSError):  # only where swap is accounted for
                (folder / "memory.swap.max").write_text("0")
            return cls(folder)
        return None

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text("0")  # "0" stands for the writing process

    def remove(self) -> None:
        with suppress(OSError):  # a child that was left behind is still in it
            self.folder.rmdir()


def run_capped(command: Sequence[str], limit_bytes: int) -> int:
    """Runs a command with at most this much memory; returns its exit status."""
    group = Cgroup.create(limit_bytes)
    enter: Callable[[], None]
    if group is not None:
        enter, kind = group.enter, "cgroup"
    else:
        kind = "rlimit"

        def enter() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    child = subprocess.Popen(command, env={**os.environ, KIND_VARIABLE: kind}, preexec_fn=enter)
    try:
        while True:
            with suppress(KeyboardInterrupt):  # the command gets it too, and ends in its own way
                return child.wait()
    finally:
        if group is not None:
            group.remove()


def cgroup_peak_bytes() -> int | None:
    """The most memory that this process's cgroup has held, its page cache included; None if it has
    no cgroup of its own."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        root = CGROUPS / "memory" if "memory" in controllers.split(",") else CGROUPS
        if controllers and root == CGROUPS:
            continue
        for name in _PEAKS:
            with suppress(OSError, ValueError):
                return int((root / path.lstrip("/") / name).read_text())
    return None
