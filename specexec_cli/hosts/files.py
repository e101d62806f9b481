"""Whether two machines have the same model: hashes over whole files, each made once and kept."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from specexec_cli.device import format_bytes
from specexec_cli.errors import CheckpointError
from specexec_cli.kept import read_json, write_json
from specexec_cli.offload.checkpoint import Checkpoint

_TOLD_BYTES = 1_000_000_000  # to be hashed, from which on a line says so
_BLOCK_BYTES = 1 << 20  # of a file, between looks whether anybody still waits for its hash
_MOST_KEPT = 2000  # files whose hashes are kept: of models with many shards

# (size, time of the last change in ns, SHA-256) by path
Hashes = dict[str, tuple[int, int, str]]


def digest_of(checkpoint: Checkpoint, notice: Callable[[str], None] = lambda line: None) -> str:
    """A hash of the config, of every tensor's name, dtype and shape, and of all files' bytes.

    A file is read for it once: later its size and the time of its last change tell that it is the
    same. One core hashes 2 GB/s, so that an SSD is the slower of both.

    Args:
        notice: told, in one line, if much is read.
    Raises:
        CheckpointError: a file cannot be read.
    """
    told = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    tensors = [
        [name, checkpoint[name].dtype, list(checkpoint[name].shape)] for name in sorted(checkpoint)
    ]
    paths = {checkpoint[name].path.resolve() for name in checkpoint}
    told.update(json.dumps([tensors, sorted(file_hashes(paths, notice))]).encode())
    return told.hexdigest()


def file_hashes(paths: Iterable[Path], notice: Callable[[str], None]) -> list[str]:
    """The SHA-256 of files, read where it is not kept; see `digest_of`."""
    kept = load_hashes(hashes_file())
    now = dict[Path, os.stat_result]()
    for path in paths:
        with _reading(path):
            now[path] = path.stat()
    same = {
        path: kept.get(str(path), (0, 0, ""))[:2] == (stat.st_size, stat.st_mtime_ns)
        for path, stat in now.items()
    }
    new = [path for path in now if not same[path]]
    if (n_bytes := sum(now[path].st_size for path in new)) >= _TOLD_BYTES:
        notice(f"reading {format_bytes(n_bytes)} of the model's files, once, for their hashes")
    made = dict(zip(new, _hashed(new), strict=True))
    for path, digest in made.items():
        kept.pop(str(path), None)  # so that it counts as the newest
        kept[str(path)] = now[path].st_size, now[path].st_mtime_ns, digest
    if made:
        with suppress(OSError):  # a cache: what cannot be kept is read again
            write_json(hashes_file(), dict([*kept.items()][-_MOST_KEPT:]))
    return [kept[str(path)][2] for path in now]


def _hashed(paths: Sequence[Path]) -> list[str]:
    """The SHA-256 of files that are read at once; Ctrl-C waits for a block of each at most."""
    over = threading.Event()
    with ThreadPoolExecutor(min(len(paths), os.cpu_count() or 1) or 1) as threads:
        try:
            return [*threads.map(partial(_sha256, over), paths)]
        except BaseException:
            over.set()  # the executor waits for its threads
            raise


def _sha256(over: threading.Event, path: Path) -> str:
    """Of a whole file, unless it is over before: then nobody asks for it."""
    found = hashlib.sha256()
    with _reading(path), path.open("rb") as file:
        while not over.is_set() and (block := file.read(_BLOCK_BYTES)):
            found.update(block)
    return found.hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Tells which file it was where one cannot be read: not every OSError does."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def hashes_file() -> Path:
    """Where hashes of files are kept."""
    return user_cache_path("specexec", appauthor=False) / "file-hashes.json"


def load_hashes(path: Path) -> Hashes:
    """What is kept; nothing where the file is missing or damaged."""
    try:
        found = read_json(path)
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: (each[0], each[1], each[2]) for name, each in found.items() if _is_hash(each)}


def _is_hash(value: Any) -> bool:
    """Whether a value is a size, a time and a SHA-256."""
    return (
        isinstance(value, list)
        and [type(each) for each in value] == [int, int, str]
        and len(value[2]) == hashlib.sha256().digest_size * 2
    )
