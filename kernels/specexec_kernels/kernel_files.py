"""Machine code of CPU kernels, kept in files: the next process need neither build nor compile it.

One takes 0.1 to 1.5 s, and a model of several formats has a dozen.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

_DIGEST_BYTES = 32


def folder() -> Path:
    """Where the files are: SPECEXEC_KERNEL_CACHE, or `kernels` in the user's cache folder."""
    given = os.environ.get("SPECEXEC_KERNEL_CACHE")
    return Path(given) if given else user_cache_path("specexec", appauthor=False) / "kernels"


def read(symbol: str) -> bytes | None:
    """An object file as this user kept it; None where there is none, or it is not to be trusted.

    The bytes are run as code. So the file and its folder have to be this user's and writable by
    nobody else, and the file has to begin with the digest of its symbol and machine code.

    Args:
        symbol: a name that says all that the machine code follows from.
    """
    try:
        with _opened_folder() as where:
            file = os.open(f"{symbol}.o", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=where)
            with open(file, "rb") as opened:
                _check_ours(file, stat.S_ISREG)
                stored = opened.read()
    except OSError:  # a cache: it is compiled
        return None
    digest, machine_code = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    return machine_code if _digest(symbol, machine_code) == digest else None


def keep(symbol: str, machine_code: bytes) -> None:
    """Writes an object file, whole or not at all; where that fails the next process compiles."""
    partial = f"{symbol}.{secrets.token_hex(8)}"  # another process may be at the same one
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.environ.get("SPECEXEC_KERNEL_CACHE"):
            folder().chmod(0o700)  # one that was made under another umask; a given one stays
        with _opened_folder() as where:
            file = os.open(partial, flags, 0o600, dir_fd=where)
            try:
                with open(file, "wb") as opened:
                    opened.write(_digest(symbol, machine_code) + machine_code)
                os.replace(partial, f"{symbol}.o", src_dir_fd=where, dst_dir_fd=where)
            except OSError:
                os.unlink(partial, dir_fd=where)
                raise


@contextlib.contextmanager
def _opened_folder() -> Iterator[int]:
    """The folder's descriptor, so that what was checked is what is used.

    Raises:
        OSError: there is no such folder, or others than this user could have written into it.
    """
    where = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_ours(where, stat.S_ISDIR)
        yield where
    finally:
        os.close(where)


def _check_ours(file: int, is_kind: Callable[[int], bool]) -> None:
    """
    Raises:
        PermissionError: it is of another kind or user, or others may write it.
    """
    found = os.fstat(file)
    if not is_kind(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError("machine code that others may have written is not run")


def _digest(symbol: str, machine_code: bytes) -> bytes:
    return hashlib.sha256(symbol.encode() + b"\0" + machine_code).digest()


@cache
def code_digest() -> str:
    """Of all files that kernels are built by."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for path in sorted(here.rglob("*.py")):
        digest.update(f"{path.relative_to(here)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
