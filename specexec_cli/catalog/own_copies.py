"""Lists and deletes the low-bit copies of targets, which draft for their targets.

planning/draft_sizes.py names them, models/own_copy.py makes them. Each name ends in the bits and
the version of the format; one that ends in `.partial-` and a number was left by a process that was
ended, and the next that makes the copy goes on behind its layers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_cache_path

from specexec_cli.errors import NotFetchedError

if TYPE_CHECKING:
    from filelock import FileLock

PREFIX = "self:"  # begins a copy's name where models are named too
PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """A copy's folder in the cache; the target may have changed or gone since."""

    name: str
    folder: Path
    size_bytes: int


def copies_folder() -> Path:
    """The folder of all copies; it may not exist."""
    return user_cache_path("specexec", appauthor=False) / "self"


def lock_of(folder: Path) -> FileLock:
    """The lock that a process holds while it makes or removes the copy in this folder."""
    from filelock import FileLock

    return FileLock(folder.parent / f"{folder.name.partition(PARTIAL)[0]}.lock")


def own_copies(beginning: str = "") -> list[OwnCopy]:
    """All copies, whole or partial, with names that begin with `beginning`, sorted by name."""
    folders = sorted(path for path in copies_folder().glob("*") if path.is_dir())
    return [
        OwnCopy(f"{PREFIX}{folder.name}", folder, _size_bytes(folder))
        for folder in folders
        if f"{PREFIX}{folder.name}".startswith(beginning)
    ]


def _size_bytes(folder: Path) -> int:
    """Bytes of the files in a folder; files renamed or removed meanwhile count as nothing."""
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                found += (Path(parent) / name).stat().st_size
    return found


def remove_copy(found: OwnCopy) -> None:
    """Deletes a copy. A session that drafts with it goes on; the next one makes it anew.

    Raises:
        NotFetchedError: another process is making it, or a file cannot be deleted.
    """
    with _held(found):
        try:
            shutil.rmtree(found.folder)
        except OSError as error:
            raise NotFetchedError(
                f"cannot delete {error.filename or found.folder}: {error.strerror}"
            ) from error


@contextmanager
def _held(found: OwnCopy) -> Iterator[None]:
    from filelock import Timeout

    lock = lock_of(found.folder)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise NotFetchedError(
            f"{found.name} is being made by another process: wait for it, or end that one first"
        ) from None
    except OSError as error:
        raise NotFetchedError(f"cannot delete {found.folder}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()
