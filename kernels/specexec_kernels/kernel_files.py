"""Machine code of CPU kernels, kept in files: the next process need neither build nor compile it.

One takes 0.1 to 1.5 s, and a model of several formats has a dozen.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

_DIGEST_BYTES = 32


def folder() -> Path:
    """Where the files are: SPECEXEC_KERNEL_CACHE, or `kernels` in the user's cache folder."""
    given = os.environ.get("SPECEXEC_KERNEL_CACHE")
    return Path(given) if given else user_cache_path("specexec", appauthor=False) / "kernels"


def read(symbol: str) -> bytes | None:
    """An object file as it was kept; None where there is none, or it is damaged.

    Args:
        symbol: a name that says all that the machine code follows from.
    """
    try:
        stored = (folder() / f"{symbol}.o").read_bytes()
    except OSError:  # a cache: it is compiled
        return None
    digest, machine_code = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    return machine_code if hashlib.sha256(machine_code).digest() == digest else None


def keep(symbol: str, machine_code: bytes) -> None:
    """Writes an object file, whole or not at all; where that fails the next process compiles."""
    path = folder() / f"{symbol}.o"
    partial = path.with_suffix(f".{os.getpid()}")  # another process may be at the same one
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(hashlib.sha256(machine_code).digest() + machine_code)
        partial.replace(path)


@cache
def code_digest() -> str:
    """Of all files that kernels are built by."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for path in sorted(here.rglob("*.py")):
        digest.update(f"{path.relative_to(here)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
