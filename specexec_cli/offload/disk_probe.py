"""Measures the disk's read rate, reading as a pass does; link_probe.py measures the GPU's link.

The disk's rate is an average, because a pass will get the average. Other rates are those of the
fastest of several short runs (best_of), because disturbances only ever slow a run down.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specexec_cli.errors import StreamError
from specexec_cli.offload.memory import HugeBuffer
from specexec_cli.offload.reader import BLOCK_BYTES, PIECE_BYTES, READER_THREADS, DirectFile

if TYPE_CHECKING:
    pass

RUN_BYTES = 64 << 20  # read in sequence from each random start
_TEMPORARY_BYTES = 256 << 20
_MEND = "Close other programs"


@dataclass(frozen=True, slots=True)
class SsdProbe:
    """Sequential read rate. If `direct` is False, O_DIRECT was refused: the page cache may help."""

    bytes_per_s: float
    direct: bool
    n_bytes: int = 0  # bytes that the disk moved for the measurement


def probe_ssd(paths: Sequence[Path], seconds: float = 1.0, run_bytes: int = RUN_BYTES) -> SsdProbe:
    """Reads runs from random places of these files the way a pass does, for about `seconds`.

    Args:
        run_bytes: read in sequence from each random start.
    Raises:
        StreamError: nothing to read, or the disk fails.
        OutOfMemoryError: no memory for the read buffers.
    """
    files: list[DirectFile] = []
    buffers: list[HugeBuffer] = []
    refused: list[str] = []
    try:
        for path in paths:
            files.append(DirectFile(path, refused.append))
        pieces = _random_pieces([file for file in files if file.n_bytes], run_bytes)
        for _ in range(READER_THREADS):
            buffers.append(HugeBuffer(PIECE_BYTES, "the probe's buffer", _MEND))
        n_bytes, took_s = _read_for(pieces, buffers, seconds)
        return SsdProbe(n_bytes / took_s, not refused, n_bytes)
    finally:
        for file in files:
            file.close()
        for buffer in buffers:
            buffer.close()


def probe_folder(
    folder: Path,
    seconds: float = 1.0,
    run_bytes: int = RUN_BYTES,
    temporary_bytes: int = _TEMPORARY_BYTES,
) -> SsdProbe:
    """Runs probe_ssd on a folder's largest weight files, or on a temporary file without such.

    Args:
        run_bytes: as for probe_ssd; a folder whose files are all smaller counts as without any.
        temporary_bytes: size of the temporary file.
    Raises:
        StreamError: the folder cannot be read or written.
    """
    weights = sorted(folder.rglob("*.safetensors"), key=lambda path: -path.stat().st_size)[:4]
    if weights and weights[0].stat().st_size >= run_bytes:
        return probe_ssd(weights, seconds, run_bytes)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".specexec-probe-") as file:
            block = os.urandom(4 << 20)  # a disk may compress zeros
            for _ in range(temporary_bytes // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            found = probe_ssd([Path(file.name)], seconds, run_bytes)
            return replace(found, n_bytes=found.n_bytes + temporary_bytes)
    except OSError as error:
        raise StreamError(f"cannot write to {folder} to measure it: {error.strerror}") from None


def _random_pieces(
    files: Sequence[DirectFile], run_bytes: int
) -> Callable[[], tuple[DirectFile, int, int]]:
    """A function that returns the next (file, start, stop), in runs; call it under a lock."""
    if not files:
        raise StreamError("no file to measure the disk with: give one that is not empty")
    run: list[tuple[DirectFile, int, int]] = []

    def take() -> tuple[DirectFile, int, int]:
        if not run:
            file = random.choices(files, [file.n_bytes for file in files])[0]
            start = random.randrange(max(1, file.n_bytes - run_bytes)) // BLOCK_BYTES * BLOCK_BYTES
            end = min(start + run_bytes, -(-file.n_bytes // BLOCK_BYTES) * BLOCK_BYTES)
            run.extend(
                (file, at, min(at + PIECE_BYTES, end)) for at in range(start, end, PIECE_BYTES)
            )
            run.reverse()
        return run.pop()

    return take


def _read_for(
    take: Callable[[], tuple[DirectFile, int, int]], buffers: Sequence[HugeBuffer], seconds: float
) -> tuple[int, float]:
    """Reads for about `seconds`, a thread for each buffer; returns bytes read and seconds taken."""
    lock = threading.Lock()
    total = 0
    errors: list[BaseException] = []
    started = time.perf_counter()
    deadline = started + seconds

    def read(buffer: HugeBuffer) -> None:
        nonlocal total
        try:
            while not errors:
                with lock:
                    file, start, stop = take()
                count = file.read_into(buffer.view[: stop - start], start, stop)
                with lock:
                    total += count
                if time.perf_counter() >= deadline:  # each thread reads one piece at least
                    return
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error.with_traceback(None))

    threads = [threading.Thread(target=read, args=(buffer,), daemon=True) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return total, time.perf_counter() - started


def best_of(repeats: int, run: Callable[[], object], deadline: float = math.inf) -> float:
    """Seconds of the fastest of up to `repeats` runs; only the first begins past the deadline."""
    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        if started > deadline and best < math.inf:
            break
        run()
        best = min(best, time.perf_counter() - started)
    return best
