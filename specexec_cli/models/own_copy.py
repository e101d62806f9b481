"""Makes and keeps the low-bit copy of a target that drafts for it (`draft='self'`).

The folder under its final name is whole or not there: it is written under another name and renamed.
One process makes it while others that want the same one wait for its lock, which the system lets go
of when a process ends, however it ends; what a killed one left behind is removed then.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from specexec_cli.errors import CheckpointError, ConfigError, NotFetchedError
from specexec_cli.models.quantize import Progress, plan_quantization, write_quantized
from specexec_cli.offload.store import Checkpoint, read_checkpoint
from specexec_cli.planning.low_bits import GROUP_SIZE, own_folder

Notice = Callable[[str], None]


def own_copy(
    target: Checkpoint,
    bits: int,
    notice: Notice = lambda text: None,
    progress: Progress = lambda done, total: None,
    pieces: Callable[[], Sequence[Sequence[int]]] = list,
) -> Checkpoint:
    """The target's copy in so many bits, made at the first use.

    Args:
        pieces: gives those of a calibration text, as tokens; asked where the copy is made.
        notice: told that it is made, or that another process is waited for.
        progress: told (done, total) bytes of the target while it is made.
    Raises:
        ConfigError: the target's weights cannot be quantized.
        NotFetchedError: the cache folder cannot be written, or its disk is too small.
    """
    folder = own_folder(target, bits)
    if folder.is_dir():
        return read_checkpoint(folder)
    try:
        plan = plan_quantization(target, bits, GROUP_SIZE)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(
            f"the target has no {bits}-bit copy to draft with: {error}. Give another `draft`"
        ) from error
    with _alone(folder, notice):
        if folder.is_dir():  # made while this process waited
            return read_checkpoint(folder)
        for left in folder.parent.glob(f"{folder.name}.partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        notice(f"making a {bits}-bit copy of the target, once, in {folder}")
        write_quantized(plan, folder, progress, pieces=pieces())
    return read_checkpoint(folder)


@contextmanager
def _alone(folder: Path, notice: Notice) -> Iterator[None]:
    """No other process makes this folder meanwhile."""
    lock = FileLock(folder.parent / f"{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            notice(f"another process is making {folder}: waiting for it")
            lock.acquire()
    except OSError as error:
        raise NotFetchedError(
            f"{folder.parent} cannot be written ({error.strerror}): make room, or give a `draft`"
        ) from error
    try:
        yield
    finally:
        lock.release()


def copy_obstacle(target: Checkpoint, bits: int) -> str:
    """Why a target can have no copy of itself in so many bits; empty where it can."""
    try:
        plan_quantization(target, bits, GROUP_SIZE)
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""
