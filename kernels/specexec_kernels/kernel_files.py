"""Keeps the machine code of CPU kernels in files, so that the next process need not compile them.

Compiling a kernel takes 0.1 to 1.5 s, and a model of several formats needs a dozen.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType

from platformdirs import user_cache_path

_DIGEST_BYTES = 32


def folder() -> Path:
    """The folder of the files: SPECEXEC_KERNEL_CACHE, or `kernels` in the user's cache folder."""
    given = os.environ.get("SPECEXEC_KERNEL_CACHE")
    return Path(given) if given else user_cache_path("specexec", appauthor=False) / "kernels"


def read(symbol: str) -> bytes | None:
    """What this user kept for a symbol, an object file or a digest; None if nothing is safe.

    The bytes are run as code. So the file and its folder must belong to this user and be writable
    by nobody else, and the file must begin with the digest of its symbol and machine code.

    Args:
        symbol: a name that differs for different machine code.
    """
    try:
        with _opened_folder() as where:
            file = os.open(f"{symbol}.o", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=where)
            with open(file, "rb") as opened:
                _check_ours(file, stat.S_ISREG)
                stored = opened.read()
    except OSError:  # this is a cache: the kernel is compiled instead
        return None
    digest, machine_code = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    return machine_code if _digest(symbol, machine_code) == digest else None


def keep(symbol: str, machine_code: bytes) -> None:
    """Writes an object file, whole or not at all. On failure the next process compiles again."""
    partial = f"{symbol}.{secrets.token_hex(8)}"  # another process may write the same symbol
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.environ.get("SPECEXEC_KERNEL_CACHE"):
            # an older folder may be open to others; one that the user named is left as it is
            folder().chmod(0o700)
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
    """A descriptor of the folder. Files are opened by it, so that they are in the folder that was
    checked.

    Raises:
        OSError: there is no such folder, or other users could have written into it.
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
        PermissionError: the file is of another kind, belongs to another user, or others may write
            to it.
    """
    found = os.fstat(file)
    if not is_kind(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError("machine code that others may have written is not run")


def _digest(symbol: str, machine_code: bytes) -> bytes:
    return hashlib.sha256(symbol.encode() + b"\0" + machine_code).digest()


@cache
def code_digest() -> str:
    """A digest of all code of this package, any of which may change a kernel's machine code.

    Docstrings and comments are left out: a user's kernels need not be compiled again because a
    sentence is worded in another way.
    """
    return digest_of(Path(__file__).parent)


def digest_of(package: Path) -> str:
    """A digest of the code in all Python files below a folder, without docstrings and comments.

    Compiling them takes a tenth of a second, so the digest is kept under one of the files' bytes.
    """
    files = [
        (str(path.relative_to(package)), path.read_bytes())
        for path in sorted(package.rglob("*.py"))
    ]
    stored = hashlib.sha256(repr((sys.version, files)).encode()).hexdigest()
    if (kept := read(f"code-{stored}")) is not None:
        return kept.decode()
    digest = hashlib.sha256()
    for name, content in files:
        code = compile(content, "", "exec", dont_inherit=True, optimize=2)
        digest.update(f"{name} {_constant(code)}\n".encode())
    keep(f"code-{stored}", digest.hexdigest().encode())
    return digest.hexdigest()


def _constant(value: object) -> str:
    """A constant of compiled code as text that is the same in every process; for code, what it does
    without the lines that it stands on."""
    if isinstance(value, CodeType):
        parts = (value.co_name, value.co_code, value.co_exceptiontable, value.co_names,
                 value.co_varnames, value.co_cellvars, value.co_freevars, value.co_argcount,
                 value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)  # fmt: skip
        return f"{parts} {_constant(value.co_consts)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):  # its order differs from process to process
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return repr(value)
