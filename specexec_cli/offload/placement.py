"""Where a session's layers will live on this machine: the plan with measured numbers put in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specexec_cli.config import OffloadMode
from specexec_cli.device import format_bytes
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload.demand import gpu_parts
from specexec_cli.offload.plan import Machine, Plan, Work, make_plan, slot_bytes
from specexec_cli.offload.plan import Placement as DeviceTier
from specexec_cli.offload.probe import probe_ssd
from specexec_cli.offload.sizes import ModelBytes, checkpoint_bytes
from specexec_cli.offload.store import Checkpoint

_PROBE_S = 0.3
_SMALL_PROBE_S = 0.05  # of files that are read faster than a long probe takes
_SMALL_BYTES = 1_000_000_000
_STAY_SHARE = 4  # a converted copy in a quarter of the free memory is not worth streaming


@dataclass(frozen=True, slots=True)
class Placement:
    """What --offload came to."""

    label: str  # none, or the tiers in use joined by +
    tiers: tuple[DeviceTier, ...] | None  # per layer; None: loaded to stay
    slots: int  # of the ring in RAM
    device_slots: int  # of the ring on a GPU
    link_bytes_per_s: float | None  # at which streamed bytes can come, where it is known
    ssd_share: float = 1.0  # of the bytes a pass streams, what comes from the SSD


def model_sizes(checkpoint: Checkpoint) -> ModelBytes:
    """Sizes of a checkpoint on disk."""
    config = json.loads((checkpoint.folder / "config.json").read_text("utf-8"))
    return checkpoint_bytes(checkpoint, config)


def place_on_cpu(
    mode: OffloadMode,
    target: Checkpoint,
    draft: Checkpoint | None,
    work: Work,
    ram_bytes: int,
) -> Placement:
    """Chooses each layer's tier for a CPU session.

    Args:
        ram_bytes: free.
    Raises:
        OutOfMemoryError: what was asked for does not fit; says what to do.
    """
    sizes, free = model_sizes(target), ram_bytes
    loaded = sizes.loaded(work.item_bytes)
    if mode == "none" or (mode == "auto" and loaded < free // _STAY_SHARE):
        if loaded > free:
            raise OutOfMemoryError(
                f"target needs {format_bytes(loaded)} of RAM but {format_bytes(free)} are "
                "free. Stream it from SSD instead: --offload ssd"
            )
        return Placement("none", None, 2, 2, None)
    if mode == "ram":
        return Placement("ram", _all("ram", sizes), 2, 2, None)
    files = sorted({tensor.path for tensor in target.values()})
    link = _ssd_rate(files, target.total_bytes)
    if mode == "ssd":
        slots = 3 if 4 * slot_bytes(sizes.layers) < free else 2
        return Placement("ssd", _all("ssd", sizes), slots, 2, link)
    draft_sizes = model_sizes(draft) if draft is not None else None
    # this process is loaded already, so its memory is no longer among what is free
    plan = make_plan(sizes, draft_sizes, work, Machine(ram_bytes=free, base_bytes=0))
    return _from_plan(plan, plan.tiers, link if "ssd" in plan.tiers else None)


def place_on_gpu(
    mode: OffloadMode,
    target: Checkpoint,
    draft: Checkpoint | None,
    work: Work,
    ram_bytes: int,
    vram_bytes: int,
    probe_link: Callable[[], float],
) -> Placement:
    """Chooses each layer's tier for a GPU session: as many resident as fit, the rest streamed.

    Args:
        ram_bytes: free.
        vram_bytes: free on the device.
        probe_link: measures bytes per second from RAM to the device.
    Raises:
        OutOfMemoryError: what was asked for does not fit; says what to do.
    """
    sizes = model_sizes(target)
    draft_sizes = model_sizes(draft) if draft is not None else None
    if mode == "none":
        beside = sum(size for _, size in gpu_parts(sizes, draft_sizes, work))
        needed = beside + sizes.loaded(work.item_bytes) - sizes.resident
        if needed > Machine(ram_bytes=0, vram_bytes=vram_bytes).usable(vram_bytes):
            raise OutOfMemoryError(
                f"target and draft model need {format_bytes(needed)} of GPU memory but "
                f"{format_bytes(vram_bytes)} are free. Stream the target: --offload auto"
            )
        return Placement("none", None, 2, 2, None)
    machine = Machine(ram_bytes=ram_bytes, vram_bytes=vram_bytes, base_bytes=0)
    plan = make_plan(sizes, draft_sizes, work, machine)
    tiers = plan.tiers
    if mode in ("ram", "ssd"):  # what does not stay on the device comes from there
        tiers = tuple("resident" if tier == "resident" else mode for tier in tiers)
    files = sorted({tensor.path for tensor in target.values()})
    ssd, streamed = _bytes_of("ssd", tiers, sizes), sum(sizes.layers)
    streamed -= _bytes_of("resident", tiers, sizes)
    if not streamed:
        return _from_plan(plan, tiers, None)
    share, rate = ssd / streamed, probe_link()
    if ssd:  # both links are busy at once, and the SSD with its share only
        rate = min(rate, _ssd_rate(files, target.total_bytes) / share)
    return _from_plan(plan, tiers, rate, share)


def _bytes_of(tier: DeviceTier, tiers: Sequence[DeviceTier], sizes: ModelBytes) -> int:
    return sum(size for size, own in zip(sizes.layers, tiers, strict=True) if own == tier)


def _from_plan(
    plan: Plan, tiers: tuple[DeviceTier, ...], link: float | None, ssd_share: float = 1.0
) -> Placement:
    label = "+".join(sorted(set(tiers)))
    slots, device_slots = max(2, plan.ssd_slots), max(2, plan.device_slots)
    return Placement(label, tiers, slots, device_slots, link, ssd_share)


def _all(tier: DeviceTier, sizes: ModelBytes) -> tuple[DeviceTier, ...]:
    return (tier,) * len(sizes.layers)


def _ssd_rate(files: Sequence[Path], total_bytes: int) -> float:
    """A short probe of these very files.

    Not the doctor's figure: that may be of another disk, and of another day.
    """
    return probe_ssd(files, _SMALL_PROBE_S if total_bytes < _SMALL_BYTES else _PROBE_S).bytes_per_s
