"""The folder of kept prefixes: which models have files there, how much it may hold, what leaves.

Every model, dtype and arithmetic has a folder of its own. A file's time of access says when it was
last used, and is set by whoever uses it, whatever the file system is told about such times; the
time of change stays that of its writing. All of it is a cache: any file may be removed at any time,
by this program or by the user.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from platformdirs import user_cache_path

from specexec_cli.errors import NotFetchedError
from specexec_cli.prefixes.segments import END, ROWS

_SHARE = 10  # of the disk that is free for it, the folder takes one part in so many
_LEFT_FREE_BYTES = 1_000_000_000  # of the disk, at least
_AT_ONCE = 16  # one part in so many of the bound is freed at once, so that few files are looked at
_UNFINISHED_NS = (
    600 * 10**9
)  # after which a file that is being written is one that a killed process left


def prefixes_folder() -> Path:
    """The folder of all models' prefixes; it may not exist."""
    return user_cache_path("specexec", appauthor=False) / "prefixes"


@dataclass(frozen=True, slots=True)
class ModelPrefixes:
    """The files of one model, in one dtype and arithmetic."""

    name: str
    folder: Path
    files: int
    size_bytes: int
    used_s: float  # when one of them was last used, in seconds since 1970


def kept_prefixes(beginning: str = "") -> list[ModelPrefixes]:
    """What is kept, by names that begin with `beginning`, the last used first."""
    found = []
    for folder in _folders():
        if folder.name.startswith(beginning):
            files = [status for _, status in _files(folder)]
            if not files:
                continue
            size = sum(status.st_size for status in files)
            used = max(status.st_atime for status in files)
            found.append(ModelPrefixes(folder.name, folder, len(files), size, used))
    return sorted(found, key=lambda each: -each.used_s)


def remove_prefixes(found: ModelPrefixes) -> None:
    """Deletes a model's files. A session that writes some goes on, and makes its folder anew.

    Raises:
        NotFetchedError: a file cannot be deleted.
    """
    try:
        for path, _ in _files(found.folder):
            path.unlink(missing_ok=True)
        found.folder.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if any(_files(found.folder)):
            raise NotFetchedError(
                f"cannot delete {error.filename or found.folder}: {error.strerror}"
            ) from error


def _folders() -> Iterator[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from sorted(path for path in prefixes_folder().iterdir() if path.is_dir())


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The files of a folder, those that are being written too; files that leave are left out.

    A folder that cannot be read has none: whoever writes into it is told why.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    yield Path(entry.path), entry.stat(follow_symlinks=False)


def names_in(folder: Path) -> set[str]:
    """The names of a model's files; empty if it has none."""
    return {path.name for path, _ in _files(folder) if path.suffix in (ROWS, END)}


def touch(paths: Iterable[Path]) -> None:
    """Notes that files were used, one after another; files that are gone are left out."""
    for path in paths:
        with suppress(OSError):
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


class Bound:
    """How much the folder may hold.

    Args:
        asked_bytes: the bound that the user asks for; None for a tenth of what is free for it.
    """

    def __init__(self, asked_bytes: int | None = None) -> None:
        self._asked_bytes = asked_bytes
        self._room = 0  # bytes that may be written before the files are looked at again
        self._lock = Lock()

    def bytes(self, kept_bytes: int) -> int:
        """The bound, where files of `kept_bytes` are there; other programs' files may lower it."""
        available = kept_bytes + _free_bytes(prefixes_folder())
        asked = available // _SHARE if self._asked_bytes is None else self._asked_bytes
        return max(0, min(asked, available - _LEFT_FREE_BYTES))

    def make_room(self, n_bytes: int, text: Callable[[], Sequence[Path]]) -> bool:
        """Whether `n_bytes` may be written; the files that were used longest ago leave for them.

        Files that killed processes left unfinished leave first.

        Args:
            text: returns the files of the text that goes on in what is to be written, in order.
                They count as used now, and do not leave for it.
        """
        with self._lock:  # the rows of a target and of its draft model are written side by side
            return self._made_room(n_bytes, text)

    def _made_room(self, n_bytes: int, text: Callable[[], Sequence[Path]]) -> bool:
        if self._room >= n_bytes:
            self._room -= n_bytes
            return True
        spared = text()
        never = set(spared)
        touch(reversed(spared))  # so that a text loses its end before its beginning
        files = [each for folder in _folders() for each in _files(folder)]
        whole = [each for each in files if each[0].suffix in (ROWS, END)]
        old_ns = time.time_ns() - _UNFINISHED_NS
        left = [each for each in files
                if each[0].suffix not in (ROWS, END) and each[1].st_mtime_ns < old_ns]  # fmt: skip
        kept = sum(status.st_size for _, status in files)
        kept -= sum(_removed(path, status) for path, status in left)
        bound = self.bytes(kept)
        most = bound - n_bytes
        goal = most if kept <= most else most - bound // _AT_ONCE
        for path, status in sorted(whole, key=lambda each: each[1].st_atime_ns):
            if kept <= goal or path in never:
                break
            kept -= _removed(path, status)
        if kept > most:
            return False
        self._room = min(most - kept, bound // _AT_ONCE)
        return True


def _free_bytes(folder: Path) -> int:
    """Free bytes of the disk that a folder is on, or will be, if it is not there."""
    try:
        return shutil.disk_usage(folder).free
    except FileNotFoundError:
        return _free_bytes(folder.parent)


def _removed(path: Path, status: os.stat_result) -> int:
    """Deletes a file; the bytes that this has freed, none where it cannot be deleted."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return 0
    return status.st_size
