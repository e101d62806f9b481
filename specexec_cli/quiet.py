"""Whether other programs disturbed a measurement: what was measured on a busy machine is not kept.

A rate is kept for months, and every prediction uses it. One that was measured beside other programs
would mislead long after they have ended.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from specexec_cli.device import all_cores, disk_bytes, usable_cores, user_seconds

_OTHERS_SHARE = 0.1  # share of this process's cores, or of its disk bytes, that others may use
_WAITING_SHARE = 0.1  # share of its time that a computing thread may wait for a core
# The system counts a core's time in ticks of 10 ms, too coarse for a shorter window.
_SHORTEST_S = 0.1
_ODD_BYTES = 16 << 20  # bytes that others may always move on the disk, such as the file system


class QuietCheck:
    """Watches what other programs use while this one measures.

    It is a context manager; or call `begin` and `pause`. Several windows add up, so a session can
    be watched while it decodes, and not while its user thinks.

    Args:
        folder: a folder on the disk that is measured; None if no disk is.
        computes: whether the measuring thread computes without a pause, so that time in which it
            does not run is time in which it waited for a core.
    Attributes:
        own_bytes: bytes that the disk moved for this program; the measuring code adds them.
    """

    def __init__(self, folder: Path | None = None, *, computes: bool = False) -> None:
        self.own_bytes = 0
        self._folder, self._computes = folder, computes
        self._began: tuple[float, ...] | None = None
        self._sums = [0.0] * len(_counts(folder))

    def __enter__(self) -> QuietCheck:
        self.begin()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.pause()

    def begin(self) -> None:
        """Begins a window, unless one is open."""
        if self._began is None:
            self._began = _counts(self._folder)

    def pause(self) -> None:
        """Ends the window that is open, if any."""
        if self._began is not None:
            ended = zip(_counts(self._folder), self._began, self._sums, strict=True)
            self._sums = [total + now - then for now, then, total in ended]
            self._began = None

    @property
    def disturbance(self) -> str:
        """What others used in all windows, such as "other programs used 63% of the CPU".

        Empty if they used next to nothing.
        """
        wall_s, thread_s, others_s, moved_bytes = self._sums
        if wall_s < _SHORTEST_S:
            return ""
        mine = usable_cores()
        # cores that this process may not use do not count: others may use those freely
        taken = max(0.0, others_s / wall_s - (all_cores() - mine)) / mine
        if taken > _OTHERS_SHARE:
            return f"other programs used {taken:.0%} of the CPU"
        if self._computes and thread_s < (1.0 - _WAITING_SHARE) * wall_s:
            return f"this program waited for a core {1.0 - thread_s / wall_s:.0%} of the time"
        others_bytes = moved_bytes - self.own_bytes
        if others_bytes > _OTHERS_SHARE * self.own_bytes + _ODD_BYTES:
            return f"other programs moved {others_bytes / 1e9:.1f} GB on the disk"
        return ""


def _counts(folder: Path | None) -> tuple[float, ...]:
    """Seconds by the clock, of this thread, and of other programs; and bytes that the disk moved.

    Counts that the system does not report are always 0.
    """
    own = os.times()
    everybody_s = user_seconds()
    others_s = 0.0 if everybody_s is None else everybody_s - own.user - own.children_user
    moved = disk_bytes(folder) if folder is not None else None
    return time.perf_counter(), time.thread_time(), others_s, float(moved or 0)
