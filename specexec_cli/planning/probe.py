"""How fast this machine is: SSD, memory, arithmetic; link_probe.py has the GPU's link.

Every rate is a best of several short runs, because disturbances only ever slow a run down; the SSD
alone is an average, because that is what a pass will get. torch is imported by what needs it.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexec_cli.errors import StreamError
from specexec_cli.offload.memory import HugeBuffer
from specexec_cli.offload.reader import BLOCK_BYTES, PIECE_BYTES, READER_THREADS, DirectFile
from specexec_cli.planning.arithmetic import FlopsByRows

if TYPE_CHECKING:
    from torch import Tensor, dtype

RUN_BYTES = 64 << 20  # read in sequence from each random start
_TEMPORARY_BYTES = 256 << 20
_MEND = "Close other programs"
_ROWS = (1, 128, 32, 8, 256)  # most telling first
_RUN_S = 0.1  # that a run may take; the first of few rows may take longer
_WIDTH = 4096  # of the square matrices that arithmetic is measured on
_GROUP = 128  # inputs that share a scale in packed ones


@dataclass(frozen=True, slots=True)
class SsdProbe:
    """Sequential read rate. Without O_DIRECT the page cache may have helped: `direct` is False."""

    bytes_per_s: float
    direct: bool
    n_bytes: int = 0  # that the disk moved for it


def probe_ssd(paths: Sequence[Path], seconds: float = 1.0) -> SsdProbe:
    """Read runs from random places of these files the way a pass does, for about `seconds`.

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
        pieces = _random_pieces([file for file in files if file.n_bytes])
        for _ in range(READER_THREADS):
            buffers.append(HugeBuffer(PIECE_BYTES, "the probe's buffer", _MEND))
        n_bytes, took_s = _read_for(pieces, buffers, seconds)
        return SsdProbe(n_bytes / took_s, not refused, n_bytes)
    finally:
        for file in files:
            file.close()
        for buffer in buffers:
            buffer.close()


def probe_folder(folder: Path, seconds: float = 1.0) -> SsdProbe:
    """probe_ssd of a folder's own weights, or of a temporary file where there are none.

    Raises:
        StreamError: the folder cannot be read or written.
    """
    weights = sorted(folder.rglob("*.safetensors"), key=lambda path: -path.stat().st_size)[:4]
    if weights and weights[0].stat().st_size >= RUN_BYTES:
        return probe_ssd(weights, seconds)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".specexec-probe-") as file:
            block = os.urandom(4 << 20)  # a disk may compress zeros
            for _ in range(_TEMPORARY_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            found = probe_ssd([Path(file.name)], seconds)
            return replace(found, n_bytes=found.n_bytes + _TEMPORARY_BYTES)
    except OSError as error:
        raise StreamError(f"cannot write to {folder} to measure it: {error.strerror}") from None


def _random_pieces(files: Sequence[DirectFile]) -> Callable[[], tuple[DirectFile, int, int]]:
    """An endless supply of (file, start, stop), in runs of RUN_BYTES. To be called under a lock."""
    if not files:
        raise StreamError("no file to measure the disk with: give one that is not empty")
    run: list[tuple[DirectFile, int, int]] = []

    def take() -> tuple[DirectFile, int, int]:
        if not run:
            file = random.choices(files, [file.n_bytes for file in files])[0]
            start = random.randrange(max(1, file.n_bytes - RUN_BYTES)) // BLOCK_BYTES * BLOCK_BYTES
            end = min(start + RUN_BYTES, -(-file.n_bytes // BLOCK_BYTES) * BLOCK_BYTES)
            run.extend(
                (file, at, min(at + PIECE_BYTES, end)) for at in range(start, end, PIECE_BYTES)
            )
            run.reverse()
        return run.pop()

    return take


def _read_for(
    take: Callable[[], tuple[DirectFile, int, int]], buffers: Sequence[HugeBuffer], seconds: float
) -> tuple[int, float]:
    """Reads for about so many seconds, a thread for each buffer; bytes, and the seconds it took."""
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
                if time.perf_counter() >= deadline:  # each reads one piece at least
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


def probe_memory(n_bytes: int = 128 << 20, repeats: int = 4) -> float:
    """Bytes per second that a copy in RAM moves, each byte counted once."""
    import torch

    source = torch.ones(n_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    return n_bytes / best_of(repeats, lambda: target.copy_(source))


def probe_flops(
    stored: dtype | int,
    compute: dtype,
    linear: Callable[[Tensor, Any], Tensor],
    rows: Sequence[int] = _ROWS,
    weight_bytes: int = 128 << 20,
    seconds: float = 1.2,
) -> FlopsByRows:
    """FLOP/s of rows times a weight matrix, by rising number of rows.

    Args:
        stored: dtype of the weights, or the bits of packed ones; `compute`: of the rows.
        linear: (rows, in), a weight -> (rows, out), as the model will call it. The weight is
            (out, in), or a PackedWeight.
        weight_bytes: as many matrices take turns, so that no cache holds the weights.
        rows: the first two are always measured.
        seconds: after this time no further one is begun, and none is repeated. Kernels may have to
            be compiled, which comes on top for the last one.
    """
    import torch

    deadline = time.perf_counter() + seconds
    bits = stored if isinstance(stored, int) else 8 * stored.itemsize
    count = max(1, 8 * weight_bytes // (_WIDTH * _WIDTH * bits))
    weights = [_weight(stored) for _ in range(count)]
    points: list[tuple[int, float]] = []
    for n_rows in rows:
        if len(points) >= 2 and time.perf_counter() > deadline:
            break
        inputs = torch.full((n_rows, _WIDTH), 0.5, dtype=compute)
        linear(inputs, weights[0])  # its kernel may have to be compiled
        one_s = best_of(1, partial(linear, inputs, weights[0]))
        # where products are fast, so that the weights of later ones are in no cache; where they
        # are slow that hardly matters
        chosen = weights[: max(1, int(_RUN_S / max(one_s, 1e-9)))]

        def run(inputs: Tensor = inputs, chosen: list[Any] = chosen) -> None:
            for weight in chosen:
                linear(inputs, weight)

        flop = 2.0 * n_rows * _WIDTH * _WIDTH * len(chosen)
        points.append((n_rows, flop / best_of(3, run, deadline)))
    return tuple(sorted(points))


def _weight(stored: dtype | int) -> Any:
    """A square matrix; values do not matter to the time, but zeros and denormal numbers might."""
    import torch

    if not isinstance(stored, int):
        return torch.full((_WIDTH, _WIDTH), 0.5, dtype=stored)
    from specexec_kernels.formats.base import PackedWeight
    from specexec_kernels.formats.gptq import Gptq

    groups = _WIDTH // _GROUP

    def words(rows: int, columns: int) -> Tensor:
        return torch.full((rows, columns), 0x35353535, dtype=torch.int32)

    tensors = {
        "qweight": words(_WIDTH * stored // 32, _WIDTH),
        "qzeros": words(groups, _WIDTH * stored // 32),
        "scales": torch.full((groups, _WIDTH), 0.5, dtype=torch.float16),
    }
    return PackedWeight(Gptq(stored, _GROUP), _WIDTH, _WIDTH, tensors)


def best_of(repeats: int, run: Callable[[], object], deadline: float = math.inf) -> float:
    """Seconds of the fastest run; behind the deadline none but the first is begun."""
    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        if started > deadline and best < math.inf:
            break
        run()
        best = min(best, time.perf_counter() - started)
    return best
