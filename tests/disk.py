"""The disk that weights are read from: slow, broken or without O_DIRECT, as a test says."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

Read = Callable[[int, Sequence[memoryview], int], int | None]


class Disk:
    """Reads go through here; nothing changes until a test says what happens.

    Args:
        patch: undoes it.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.on_read: Read | None = None  # may wait, raise OSError, or read less and say how much
        self.refuses_direct = ""  # "open": files cannot be opened for it; "read": they only open
        self.real_read, self._open = os.preadv, os.open
        self._direct: set[int] = set()
        patch.setattr(os, "preadv", self._preadv)
        patch.setattr(os, "open", self._opened)

    def fails_after(self, reads: int) -> None:
        """From the read after so many on, every one fails."""
        left = iter(range(reads))

        def read(fd: int, targets: Sequence[memoryview], offset: int) -> None:
            if next(left, None) is None:
                self.fail()

        self.on_read = read

    @staticmethod
    def fail(*args: object) -> int:
        """A read that the disk cannot do."""
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _opened(self, path: Path, flags: int, *args: int, dir_fd: int | None = None) -> int:
        direct = flags & os.O_DIRECT
        if direct and self.refuses_direct == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = self._open(
            path, flags & ~os.O_DIRECT if self.refuses_direct else flags, *args, dir_fd=dir_fd
        )
        (self._direct.add if direct and self.refuses_direct else self._direct.discard)(fd)
        return fd

    def _preadv(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        if fd in self._direct:
            self._direct.discard(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        count = self.on_read(fd, targets, offset) if self.on_read else None
        return self.real_read(fd, targets, offset) if count is None else count
