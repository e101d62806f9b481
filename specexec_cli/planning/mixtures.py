"""Where a mixture's weights go on a CPU: dense parts first, experts in what memory is left.

Every row needs a layer's dense part (attention, norms, router, shared experts), and few of its
experts. So the dense parts stay in RAM as far as they fit, and a cache of single experts takes the
rest of it. Where all layers fit, whole ones stay, and there is no cache.
"""

from __future__ import annotations

from dataclasses import replace

from specexec_cli.config import ExpertPlace, OffloadMode, Tier
from specexec_cli.device import HUGE_PAGE_BYTES
from specexec_cli.offload.slabs import COPY_BYTES, PASSING_SLOTS, STAGING_SLABS
from specexec_cli.planning.machine import Machine
from specexec_cli.planning.measured_rates import product_seconds
from specexec_cli.planning.memory import FLOAT32_BYTES, Parts, Work
from specexec_cli.planning.sizes import ExpertBytes, ModelBytes
from specexec_cli.planning.tiers import Plan, buffer_bytes, make_plan, plan_of, ring_buffers

_COARSE = 4  # of so few experts, the one that a row needs is a large share
MOST_CPU_ROWS = 64  # of an expert; with more rows its arithmetic outlasts a copy on any machine


def mixture_plan(
    mode: OffloadMode, target: ModelBytes, draft: ModelBytes | None, work: Work, machine: Machine
) -> Plan:
    """Chooses the tier of each layer's dense part, and how much experts may take.

    Args:
        mode: auto fills the memory; ssd streams every dense part and gives the experts no more
            than whole layers would take in their ring.
    Raises:
        DoesNotFitError: not even the least of it fits.
    """
    experts, dense = target.experts, target.dense
    assert experts is not None, "only mixtures have experts"
    if mode == "ssd":
        ring = ring_buffers(target, machine)
        tiers: list[Tier] = ["ssd"] * len(target.layers)
        plan = plan_of(dense, draft, work, machine, tiers, ring, 0)
        cap = ring * (buffer_bytes(target.layers) - buffer_bytes(dense.layers))
        return _with_experts(plan, target, experts, work, machine, cap)
    whole = _whole_layers(target, draft, work, machine)
    if whole is not None:
        return whole
    reserved = _least(experts) + _outputs(target, experts, work)
    less = replace(
        machine, ram_bytes=max(0, machine.ram_bytes - round(reserved / (1 - machine.margin)))
    )
    plan = make_plan(dense, draft, work, less)
    cap = machine.usable(machine.ram_bytes) - plan.peak_ram_bytes - _outputs(target, experts, work)
    return _with_experts(plan, target, experts, work, machine, cap)


def gpu_mixture_plan(
    target: ModelBytes, draft: ModelBytes | None, work: Work, machine: Machine, where: ExpertPlace
) -> Plan:
    """The same beside a GPU: dense parts in VRAM first, experts in what is left of it and of RAM.

    Whole layers move where all of them fit into VRAM, and where a row needs a large share of the
    experts (Mixtral: two of eight): large copies that are begun early are then worth more. Not
    where the CPU is to compute the experts.

    Args:
        where: experts are computed.
    Raises:
        DoesNotFitError: not even the least of it fits.
    """
    experts = target.experts
    assert experts is not None, "only mixtures have experts"
    if where != "cpu":
        if experts.chosen * _COARSE >= experts.count:
            return make_plan(target, draft, work, machine)
        beside = plan_of(target, draft, work, machine, ["resident"] * len(target.layers), 0, 0)
        if beside.peak_vram_bytes <= machine.usable(machine.vram_bytes):
            return beside
    outputs, slot = _outputs(target, experts, work), experts.largest + HUGE_PAGE_BYTES // 8
    copy_rows = _copy_rows(target, experts, machine, where)
    kept_back = outputs + (PASSING_SLOTS * slot if copy_rows is not None else 0)
    slabs = STAGING_SLABS * buffer_bytes([min(slot, COPY_BYTES)]) if copy_rows is not None else 0
    in_ram = _least(experts) + slabs
    less = replace(
        machine,
        vram_bytes=max(1, machine.vram_bytes - round(kept_back / (1 - machine.margin))),
        ram_bytes=max(0, machine.ram_bytes - round(in_ram / (1 - machine.margin))),
    )
    plan = make_plan(target.dense, draft, work, less)
    vram = machine.usable(machine.vram_bytes) - plan.peak_vram_bytes - outputs
    on_device = min(vram, (experts.in_all + PASSING_SLOTS) * slot) if copy_rows is not None else 0
    cap = machine.usable_ram() - plan.peak_ram_bytes - slabs
    most = buffer_bytes([experts.in_all * slot])
    cap = max(_least(experts), min(cap, most)) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    staged: Parts = (("slabs for experts", slabs),) if slabs else ()
    rows = work.verify_rows
    ssd_bytes = sum(
        size for size, tier in zip(target.dense.layers, plan.tiers, strict=True) if tier == "ssd"
    ) + missing_bytes(experts, cap + on_device, rows)
    plan = replace(
        plan,
        target=target,
        machine=machine,
        ram=(*plan.ram, ("expert cache", cap), *staged),
        vram=(*plan.vram, ("experts", on_device), ("experts' outputs", outputs)),
        ssd_bytes=ssd_bytes,
        expert_bytes=cap,
        device_expert_bytes=on_device,
        copy_rows=copy_rows,
    )
    return replace(plan, link_bytes=plan.link_bytes + copied_bytes(plan, experts, rows))


def _copy_rows(
    target: ModelBytes, experts: ExpertBytes, machine: Machine, where: ExpertPlace
) -> int | None:
    """Of how many rows an expert must be, to be copied to the GPU faster than the CPU is done."""
    if where != "auto":
        return 1 if where == "gpu" else None
    copy_s = experts.largest / machine.link_bytes_per_s
    if copy_s <= experts.largest / machine.host_bytes_per_s:
        return 1
    params = round(experts.largest * target.layer_params / max(1, sum(target.layers)))
    rows = 1
    while rows < MOST_CPU_ROWS and product_seconds(params, rows, machine.host_flops) < copy_s:
        rows *= 2
    return rows


def copied_bytes(plan: Plan, experts: ExpertBytes, rows: int) -> int:
    """The bytes of experts that a pass of `rows` rows is expected to copy to a GPU.

    Experts that the CPU computes are rarely copied to be kept (expert_device.py): not counted.
    """
    if plan.copy_rows is None:
        return 0
    return missing_bytes(experts, plan.device_expert_bytes, rows, plan.copy_rows)


def missing_bytes(experts: ExpertBytes, cap_bytes: int, rows: int, least: int = 1) -> int:
    """The bytes of experts that `rows` rows ask for and the cache does not hold.

    Args:
        least: count only experts to which at least this many rows are routed.
    """
    kept = min(1.0, cap_bytes / max(1, sum(experts.layers)))
    return round((1.0 - kept) * experts.asked_for(rows, least))


def _whole_layers(
    target: ModelBytes, draft: ModelBytes | None, work: Work, machine: Machine
) -> Plan | None:
    """All layers in RAM, if they fit."""
    tiers: list[Tier] = ["ram"] * len(target.layers)
    plan = plan_of(target, draft, work, machine, tiers, 0, 0)
    return plan if plan.peak_ram_bytes <= machine.usable(machine.ram_bytes) else None


def _least(experts: ExpertBytes) -> int:
    """Slots for twice the experts of one row: some are read into while others are computed."""
    return buffer_bytes([2 * experts.chosen * (experts.largest + HUGE_PAGE_BYTES // 8)])


def _outputs(target: ModelBytes, experts: ExpertBytes, work: Work) -> int:
    """What the experts of a layer add to their rows, kept until all have been computed."""
    rows = max(work.verify_rows, min(work.chunk_rows, work.context_tokens))
    return rows * experts.chosen * target.hidden * FLOAT32_BYTES


def _with_experts(
    plan: Plan,
    target: ModelBytes,
    experts: ExpertBytes,
    work: Work,
    machine: Machine,
    cap_bytes: int,
) -> Plan:
    """The plan of the dense parts with a cache of experts beside them."""
    most = buffer_bytes([experts.in_all * (experts.largest + HUGE_PAGE_BYTES // 8)])
    cap = max(_least(experts), min(cap_bytes, most)) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    ssd_bytes = plan.ssd_bytes + missing_bytes(experts, cap, work.verify_rows)
    outputs = _outputs(target, experts, work)
    return replace(
        plan,
        target=target,
        machine=machine,
        ram=(*plan.ram, ("expert cache", cap), ("experts' outputs", outputs)),
        ssd_bytes=ssd_bytes,
        expert_bytes=cap,
    )
