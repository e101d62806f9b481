"""Where each layer lives, what a pass moves, and how fast that can be. Arithmetic on bytes alone.

Layers are placed as close to the arithmetic as they fit: on the device (resident), in RAM (ram;
pinned where there is a GPU), or on the SSD (ssd). On a CPU, RAM is the device's own memory, and a
layer is ram or ssd. Knows no files, no torch, no machine: all of it comes in as numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from specexec_cli.config import Tier
from specexec_cli.device import HUGE_PAGE_BYTES
from specexec_cli.offload.slabs import SLAB_BYTES
from specexec_cli.planning.machine import Host, Machine
from specexec_cli.planning.memory import (
    DRAFT_MODEL,
    DoesNotFitError,
    Parts,
    Work,
    checkpoints,
    fixed_parts,
    gpu_parts,
    kv_bytes,
)
from specexec_cli.planning.sizes import ModelBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where everything goes, and what a verification pass moves; pass_time.py says how long."""

    target: ModelBytes  # that is placed,
    work: Work  # for sessions of this size,
    machine: Machine  # on this machine

    tiers: tuple[Tier, ...]  # per decoder layer
    ssd_buffers: int  # buffers in RAM that SSD layers go through
    device_buffers: int  # buffers on the GPU that streamed layers go through
    ram: Parts
    vram: Parts
    ssd_bytes: int  # moved per pass
    link_bytes: int
    memory_bytes: int  # of weights that a pass reads; of a mixture's, all experts
    stays: bool = False  # the whole target is loaded once, converted to the compute dtype
    replays: bool = False  # whether a GPU replays passes of few rows, see models/graphs.py
    shared_layers: int = 0  # that a copy of the target drafts with, as they stay on a GPU
    on_gpu: bool = False  # whether a GPU computes
    kv_layers: tuple[int, ...] = ()  # whose keys and values wait in RAM beside a GPU
    # What slots for experts take; `tiers` are then about the rest of each layer, and the bytes
    # moved are those of a verification pass whose rows choose all experts equally often.
    expert_bytes: int = 0
    device_expert_bytes: int = 0  # slots for experts on a GPU
    copy_rows: int | None = None  # experts of so many rows are computed on it; None: by the CPU
    # what other machines have; the target, and all bytes above, are then of this one's part
    others: tuple[SpanPlan, ...] = ()

    @property
    def label(self) -> str:
        """The tiers in use joined by +, or none where the whole target is loaded to stay."""
        if self.stays:
            return "none"
        experts = {"ssd"} if self.expert_bytes else set()
        return "+".join(sorted({*self.tiers, *experts}))

    @property
    def streams(self) -> bool:
        """Whether every pass brings weights, or keys, from an SSD or over a GPU's link."""
        return bool(self.ssd_bytes or self.link_bytes or self.expert_bytes or self.kv_layers)

    @property
    def kv_link_bytes(self) -> int:
        """Keys and values that a pass brings from RAM, half of the context being taken."""
        elements = sum(self.target.layer_kv[index] for index in self.kv_layers)
        return kv_bytes(elements * self.work.slots, self.work) // 2

    @property
    def peak_ram_bytes(self) -> int:
        return sum(size for _, size in self.ram)

    @property
    def peak_vram_bytes(self) -> int:
        return sum(size for _, size in self.vram)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPlan:
    """What another machine has of the target."""

    host: Host
    layers: range
    plan: Plan  # of these layers, on that machine

    def hop_s(self, rows: int) -> float:
        """Seconds that rows of a pass are on their way there and back."""
        work = self.plan.work
        beside = len(work.features or ()) * work.item_bytes
        return self.host.hop_s(rows, self.plan.target.hidden, beside)


def make_plan(target: ModelBytes, draft: ModelBytes | None, work: Work, machine: Machine) -> Plan:
    """The placement with the fastest verification pass that fits.

    Keys and values wait in RAM beside a GPU only where nothing fits otherwise: of as many layers as
    let the slower of both links be done first.

    Raises:
        DoesNotFitError: not even streaming everything fits, with all keys and values in RAM where
            they may wait there; says what takes how much.
    """
    try:
        return _filled(target, draft, work, machine, ())
    except DoesNotFitError:
        if not _keys_can_wait(target, work, machine):
            raise
    order = [index for index in spread_order(len(target.layers)) if target.layer_kv[index]]
    found = list[Plan]()

    def streams(count: int) -> bool:
        try:
            _on_gpu(target, draft, work, machine, order[:count])
        except DoesNotFitError:
            return False
        return True

    # with more keys in RAM, no less fits into VRAM
    first = bisect_left(range(1, len(order)), True, key=streams) + 1
    for count in range(first, len(order) + 1):
        try:
            found.append(_filled(target, draft, work, machine, order[:count]))
        except DoesNotFitError:
            if count == len(order) and not found:
                raise  # it tells what is lacking with as much as possible in RAM
    return min(found, key=_link_seconds)


def _link_seconds(plan: Plan) -> tuple[float, float]:
    """How long the slower and the faster of a pass's links take; both are busy at once."""
    link_s = (plan.link_bytes + plan.kv_link_bytes) / plan.machine.link_bytes_per_s
    ssd_s = plan.ssd_bytes / plan.machine.ssd_bytes_per_s
    return max(link_s, ssd_s), min(link_s, ssd_s)


def _keys_can_wait(target: ModelBytes, work: Work, machine: Machine) -> bool:
    """Whether layers that attend have keys and values of their own, and no draft model reads them:
    each of its steps would bring all of them. Beside recurrent layers some have none."""
    own = any(target.layer_kv) and (all(target.layer_kv) or target.state_elements > 0)
    own = own and not target.shares_keys
    read = work.shares_cache or work.reads_keys
    return machine.vram_bytes > 0 and own and not read


def _filled(
    target: ModelBytes,
    draft: ModelBytes | None,
    work: Work,
    machine: Machine,
    kv_layers: Sequence[int],
) -> Plan:
    """As make_plan, with keys and values of these layers in RAM."""
    order = spread_order(len(target.layers))
    sizes = [target.layers[index] for index in order]
    resident = device_buffers = 0
    if machine.vram_bytes:
        resident, device_buffers = _on_gpu(target, draft, work, machine, kv_layers)
    ram, _ = _beside(target, draft, work, machine, kv_layers=kv_layers)
    ring = 2 * buffer_bytes(sizes[resident:])
    usable = machine.usable_ram(sum(size for _, size in ram) + ring)
    streamed = sizes[resident:]
    in_ram, ssd_buffers = _fill(streamed, usable, "RAM", ram, [0] * len(streamed))
    tiers: list[Tier] = ["ssd"] * len(sizes)
    for rank, index in enumerate(order[: resident + in_ram]):
        tiers[index] = "resident" if rank < resident else "ram"
    return plan_of(
        target, draft, work, machine, tiers, ssd_buffers, device_buffers, kv_layers=kv_layers
    )


def _on_gpu(
    target: ModelBytes,
    draft: ModelBytes | None,
    work: Work,
    machine: Machine,
    kv_layers: Sequence[int],
) -> tuple[int, int]:
    """As _fill, of VRAM."""
    order = spread_order(len(target.layers))
    spared = shared_layers(target, draft, work)
    _, vram = _beside(target, draft, work, machine, kv_layers=kv_layers)
    return _fill(
        [target.layers[index] for index in order],
        machine.usable(machine.vram_bytes),
        "VRAM",
        vram,
        [spared[index] for index in order],
    )


def plan_of(
    target: ModelBytes,
    draft: ModelBytes | None,
    work: Work,
    machine: Machine,
    tiers: Sequence[Tier],
    ssd_buffers: int,
    device_buffers: int,
    *,
    stays: bool = False,
    kv_layers: Sequence[int] = (),
) -> Plan:
    """What a placement takes and moves; whether it fits is not checked.

    Args:
        tiers: per decoder layer.
        ssd_buffers: buffers in RAM that SSD layers go through.
        device_buffers: buffers on the GPU that streamed layers go through.
        stays: the layers are converted to the compute dtype when they are loaded.
        kv_layers: layers whose keys and values wait in RAM.
    """

    def layers(*wanted: Tier) -> list[int]:
        return [s for s, tier in zip(target.layers, tiers, strict=True) if tier in wanted]

    ram, vram = _beside(target, draft, work, machine, stays, kv_layers)
    copies = zip(shared_layers(target, draft, work), tiers, strict=True)
    spared = [size for size, tier in copies if size and tier == "resident"]
    resident = _footprint(layers("resident"))
    if stays:
        resident = target.loaded(work.item_bytes) - target.resident
    if machine.vram_bytes:
        vram = *_without(vram, DRAFT_MODEL, sum(spared)), ("resident layers", resident)
    else:
        ram += (("loaded layers", resident),)
    ram += (
        ("layers in RAM", _footprint(layers("ram"))),
        ("SSD ring", ssd_buffers * buffer_bytes(layers("ssd"))),
    )
    vram += (("device ring", device_buffers * buffer_bytes(layers("ssd", "ram"))),)
    return Plan(
        target=target,
        work=work,
        machine=machine,
        tiers=tuple(tiers),
        ssd_buffers=ssd_buffers,
        device_buffers=device_buffers,
        ram=tuple(part for part in ram if part[1]),
        vram=tuple(part for part in vram if part[1]),
        ssd_bytes=sum(layers("ssd")),
        link_bytes=sum(layers("ssd", "ram")) if machine.vram_bytes else 0,
        memory_bytes=target.loaded(work.item_bytes) - target.table if stays else target.read_bytes,
        stays=stays,
        shared_layers=len(spared),
        on_gpu=machine.vram_bytes > 0,
        kv_layers=tuple(sorted(kv_layers)),
    )


def shared_layers(target: ModelBytes, draft: ModelBytes | None, work: Work) -> Sequence[int]:
    """Of each layer the bytes of its low-bit copy, which are spared where the target's own stays on
    a GPU and drafts; 0 where layers are not shared."""
    if draft is None or not work.shares_layers:
        return [0] * len(target.layers)
    return draft.layers


def _beside(
    target: ModelBytes,
    draft: ModelBytes | None,
    work: Work,
    machine: Machine,
    stays: bool = False,
    kv_layers: Sequence[int] = (),
) -> tuple[Parts, Parts]:
    """What lies in RAM and in VRAM besides decoder layers.

    Layers whose keys and values wait in RAM share one layer's buffers on the GPU.
    """
    program: Parts = (("program", machine.base_bytes), *checkpoints(target, draft, work))
    if not machine.vram_bytes:
        return (*program, *fixed_parts(target, draft, work)), ()
    table = 0 if stays else target.table
    slabs = 0 if stays else SLAB_BYTES
    waiting = [target.layer_kv[index] for index in kv_layers]
    kept = _footprint([kv_bytes(each * work.slots, work) for each in waiting])
    ram = (*program, ("embeddings", table), ("keys and values", kept), ("slabs for copies", slabs))
    on_gpu = target.kv_elements - sum(waiting) + max(waiting, default=0)
    target = replace(target, kv_elements=on_gpu)
    return tuple(part for part in ram if part[1]), gpu_parts(
        target, draft, work, machine.context_bytes, table_in_ram=table_in_ram(stays, True)
    )


def table_in_ram(stays: bool, on_gpu: bool) -> bool:
    """Whether a target's table of embeddings is looked up in RAM, where it is not its head too.

    A pass takes a few kilobytes of it, and every gigabyte of VRAM holds layers that are then not
    streamed.
    """
    return on_gpu and not stays


def _without(parts: Parts, name: str, n_bytes: int) -> Parts:
    """The parts, one of them smaller by so many bytes."""
    return tuple((each, size - n_bytes if each == name else size) for each, size in parts)


@cache
def spread_order(count: int) -> tuple[int, ...]:
    """0..count-1 so that every beginning of the list is spread evenly (van der Corput sequence).

    Layers that need no streaming are then never neighbours while others are: the reader has
    their computing time to fetch what lies between.
    """
    bits = max(1, (count - 1).bit_length())
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return tuple(index for index in reversed_bits if index < count)


def buffer_bytes(layer_bytes: Sequence[int]) -> int:
    """Bytes of a ring buffer that holds any of these layers."""
    return _huge_pages(max(layer_bytes, default=0))


def _huge_pages(n_bytes: int) -> int:
    return -(-n_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def ring_buffers(target: ModelBytes, machine: Machine) -> int:
    """Buffers of a ring that all layers go through."""
    return 3 if 4 * buffer_bytes(target.layers) < machine.ram_bytes else 2


def _footprint(sizes: Sequence[int]) -> int:
    """Bytes of layers that stay, each in a buffer of its own."""
    return sum(_huge_pages(size) for size in sizes)


def _fill(
    sizes: Sequence[int], usable_bytes: int, memory: str, fixed: Parts, spared: Sequence[int]
) -> tuple[int, int]:
    """How many layers, from the first on, can stay while the others go through a ring.

    Args:
        spared: bytes among the fixed ones that a layer which stays makes needless.
    Returns:
        layers that stay; ring buffers for the others (0 if all stay).
    Raises:
        DoesNotFitError: not even a ring of two buffers fits.
    """
    free = usable_bytes - sum(size for _, size in fixed)
    footprints = [_huge_pages(size) for size in sizes]
    if sum(footprints) - sum(spared) <= free:
        return len(sizes), 0

    def most_that_stay(buffers: int) -> int:
        stay, largest = sum(footprints) - sum(spared), 0
        for count in range(len(sizes) - 1, -1, -1):
            stay -= footprints[count] - spared[count]
            largest = max(largest, footprints[count])
            if stay + buffers * largest <= free:
                return count
        return -1

    two, three = most_that_stay(2), most_that_stay(3)
    if two < 0:
        raise _shortage(sizes, usable_bytes, memory, fixed)
    # A third buffer evens out jitter and is worth one layer, but for one whose leaving would make
    # the ring larger. Both counts rise with memory, and so does what is returned: more memory never
    # predicts a slower pass.
    grows = two > 0 and footprints[two - 1] > max(footprints[two:])
    one_less = two if grows else max(two - 1, 0)
    return (three, 3) if three >= one_less else (one_less, 2)


def _shortage(
    sizes: Sequence[int], usable_bytes: int, memory: str, fixed: Parts
) -> DoesNotFitError:
    parts = sorted(
        [*fixed, ("two ring buffers", 2 * buffer_bytes(sizes))], key=lambda part: -part[1]
    )
    return DoesNotFitError(
        f"even fully streamed, the target needs {{needed}} of {memory} "
        "but {usable} may be used ({parts})",
        sum(size for _, size in parts),
        usable_bytes,
        tuple(parts),
    )
