"""Makes and keeps the low-bit copy of a target that drafts for it (`draft='self'`).

A copy is written under another name and then renamed, so that the folder with the final name is
always complete. A copy that was damaged later is made again. Only one process makes a copy; others
that want the same copy wait for its lock. The operating system frees the lock when a process ends,
and the next process goes on behind the layers that one left that was killed, or ended by Ctrl-C.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout

from specexec_cli.catalog.own_copies import PARTIAL, lock_of
from specexec_cli.errors import CheckpointError, ConfigError, NotFetchedError
from specexec_cli.models.quantize import (
    Progress,
    QuantizationPlan,
    layers_there,
    plan_quantization,
    write_quantized,
)
from specexec_cli.offload.checkpoint import Checkpoint, read_config
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.draft_sizes import GROUP_SIZE, own_folder

Notice = Callable[[str], None]


def own_copy(
    target: Checkpoint,
    bits: int,
    notice: Notice = lambda text: None,
    progress: Progress = lambda done, total: None,
    pieces: Callable[[], Sequence[Sequence[int]]] = list,
) -> Checkpoint:
    """The target's copy with weights of `bits` bits, made at the first use.

    Args:
        pieces: returns the pieces of a calibration text, as tokens; called only to make a copy.
        notice: told that a copy is made, or that another process is waited for.
        progress: told (done, total) bytes of the target while a copy is made.
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
        text = pieces()
        left, layers = _leftovers(plan, folder, text)
        _clear(folder, left)
        if left is None:
            notice(f"making a {bits}-bit copy of the target, once, in {folder}")
        else:
            notice(
                f"going on with the {bits}-bit copy of the target in {folder}: {layers} of "
                f"{len(plan.layers)} layers are there"
            )
        write_quantized(plan, folder, progress, pieces=text, drafts=True, left=left, stays=True)
    return read_checkpoint(folder)


def _leftovers(
    plan: QuantizationPlan, folder: Path, text: Sequence[Sequence[int]]
) -> tuple[Path | None, int]:
    """What an ended process left of this copy with most whole layers, and their number."""
    layers = {
        left: layers_there(plan, left, text, drafts=True)
        for left in folder.parent.glob(f"{folder.name}{PARTIAL}*")
    }
    best = max(layers, key=lambda left: layers[left], default=None)
    return (best, layers[best]) if best is not None and layers[best] else (None, 0)


def _kept(folder: Path, notice: Notice) -> Checkpoint | None:
    """The copy in this folder; None if there is none. A damaged copy gives a notice and None."""
    if not folder.is_dir():
        return None
    try:
        read_config(folder)
        return read_checkpoint(folder)
    except CheckpointError as error:
        notice(f"the copy in {folder} is damaged, and made anew: {error}")
        return None


def _clear(folder: Path, stays: Path | None) -> None:
    """Removes a damaged copy, and the leftovers of ended processes but one.

    Raises:
        NotFetchedError: a file cannot be deleted.
    """
    for left in [folder, *folder.parent.glob(f"{folder.name}{PARTIAL}*")]:
        if left == stays:
            continue
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
    """Holds the folder's lock, so that no other process makes the same copy.

    Raises:
        NotFetchedError: the parent folder cannot be written.
    """
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
    """Why no copy of the target in `bits` bits can be made; empty if it can be, or exists."""
    if own_folder(target, bits).is_dir():
        return ""
    try:
        plan_quantization(target, bits, GROUP_SIZE)
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""
