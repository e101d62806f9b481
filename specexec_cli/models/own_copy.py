"""Makes and keeps the low-bit copy of a target that drafts for it (`draft='self'`).

The folder under its final name is whole or not there: it is written under another name and renamed.
One that was damaged later is made anew.
One process makes it while others that want the same one wait for its lock, which the system lets go
of when a process ends, however it ends; what a killed one left behind is removed then.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout

from specexec_cli.catalog.own_copies import PARTIAL, lock_of
from specexec_cli.errors import CheckpointError, ConfigError, NotFetchedError
from specexec_cli.models.quantize import Progress, plan_quantization, write_quantized
from specexec_cli.offload.store import Checkpoint, read_checkpoint, read_config
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
        CheckpointError, ConfigError: the target's weights cannot be quantized, see copy_obstacle.
        NotFetchedError: the cache folder cannot be written, or its disk is too small.
    """
    folder = own_folder(target, bits)
    if (kept := _kept(folder, lambda text: None)) is not None:
        return kept
    plan = plan_quantization(target, bits, GROUP_SIZE)
    with _alone(folder, notice):
        if (kept := _kept(folder, notice)) is not None:  # made while this process waited
            return kept
        _clear(folder)
        notice(f"making a {bits}-bit copy of the target, once, in {folder}")
        write_quantized(plan, folder, progress, pieces=pieces())
    return read_checkpoint(folder)


def _kept(folder: Path, notice: Notice) -> Checkpoint | None:
    """The copy in this folder; None where there is none, or a damaged one, which is told."""
    if not folder.is_dir():
        return None
    try:
        read_config(folder)
        return read_checkpoint(folder)
    except CheckpointError as error:
        notice(f"the copy in {folder} is damaged, and made anew: {error}")
        return None


def _clear(folder: Path) -> None:
    """Removes a damaged copy, and what killed processes left of one.

    Raises:
        NotFetchedError: a file cannot be deleted.
    """
    for left in [folder, *folder.parent.glob(f"{folder.name}{PARTIAL}*")]:
        try:
            shutil.rmtree(left)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise NotFetchedError(
                f"{left} cannot be deleted ({error.strerror}): remove it, or give another `draft`"
            ) from error


@contextmanager
def _alone(folder: Path, notice: Notice) -> Iterator[None]:
    """No other process makes this folder meanwhile."""
    lock = lock_of(folder)
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
    """Why a target can have no copy of itself in so many bits; empty where it can, or has one."""
    if own_folder(target, bits).is_dir():
        return ""
    try:
        plan_quantization(target, bits, GROUP_SIZE)
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""
