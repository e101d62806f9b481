"""Where a target's layers go under each offload mode, and the table of what goes where.

tiers.py fills the memories. Every row needs a layer's dense part (attention, norms, router, shared
experts), and few of a mixture's experts. So the dense parts stay in RAM as far as they fit, and a
cache of single experts takes the rest of it. Where all layers fit, whole ones stay, and there is no
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specexec_cli.config import ExpertPlace, OffloadMode, Tier
from specexec_cli.device import HUGE_PAGE_BYTES
from specexec_cli.errors import ConfigError
from specexec_cli.offload.slabs import COPY_BYTES, PASSING_SLOTS, STAGING_SLABS
from specexec_cli.planning.machine import Machine
from specexec_cli.planning.machine_rates import product_seconds
from specexec_cli.planning.memory import (
    FLOAT32_BYTES,
    DoesNotFitError,
    Parts,
    Work,
    gpu_parts,
    replay_bytes,
)
from specexec_cli.planning.sizes import ExpertBytes, ModelBytes
from specexec_cli.planning.tiers import (
    Plan,
    buffer_bytes,
    make_plan,
    plan_of,
    ring_buffers,
    table_in_ram,
)

_ENDS = {"embeddings", "head"}
_STAY_SHARE = 4  # a converted copy in a quarter of the free memory is not worth streaming

_COARSE = 4  # of so few experts, the one that a row needs is a large share
MOST_CPU_ROWS = 64  # of an expert; with more rows its arithmetic outlasts a copy on any machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One row of the placement table: a part of a model, and where its weights wait."""

    model: Literal["target", "draft"]
    # The final norm is counted with the embeddings. A layer's experts are a row of their own where
    # they come one by one: those in use are kept in RAM, see Plan.expert_bytes.
    part: Literal["embeddings", "layer", "experts", "head"]
    index: int | None = None  # of a decoder layer, from 0
    tier: Tier
    converted: bool  # its matrices, to the compute dtype, when loaded; otherwise as in the file
    # in the files; a head that shares the embeddings' table has none, nor has what a copy of the
    # target takes from it
    stored_bytes: int


def placement_table(
    target: ModelBytes, draft: ModelBytes | None, plan: Plan, work: Work
) -> tuple[Placed, ...]:
    """Every part of both models, the target's first, each from the embeddings to the head."""
    split = target.experts if plan.expert_bytes else None
    rows = _rows(
        "target", target.dense if split else target, plan.tiers, plan.stays, plan.on_gpu,
        work.item_bytes,
    )  # fmt: skip
    if split is not None:
        rows[-1:-1] = [
            Placed(model="target", part="experts", index=index, tier="ssd", converted=False,
                   stored_bytes=size)
            for index, size in enumerate(split.layers)
        ]  # fmt: skip
    if draft is not None:
        tiers: list[Tier] = ["resident"] * len(draft.layers)
        own = _rows("draft", draft, tiers, True, plan.on_gpu, work.item_bytes)
        if work.shares_tables:  # its parts are the target's
            shared = _ENDS | ({"layer"} if work.shares_layers else set())
            own = [
                replace(row, stored_bytes=0)
                if exact.tier == "resident" and row.part in shared
                else row
                for row, exact in zip(own, rows, strict=True)
            ]
        rows += own
    return tuple(rows)


def _rows(
    model: Literal["target", "draft"],
    sizes: ModelBytes,
    tiers: Sequence[Tier],
    stays: bool,
    on_gpu: bool,
    item_bytes: int,
) -> list[Placed]:
    converted = converts_tables(stays, on_gpu, item_bytes)
    in_ram = table_in_ram(stays, on_gpu) and sizes.table
    return [
        Placed(
            model=model, part="embeddings", tier="ram" if in_ram else "resident",
            converted=converted,
            stored_bytes=sizes.resident - sizes.head,
        ),
        *(
            Placed(
                model=model, part="layer", index=index, tier=tier,
                converted=stays and not sizes.packed, stored_bytes=sizes.layers[index],
            )
            for index, tier in enumerate(tiers)
        ),
        Placed(
            model=model, part="head", tier="resident", converted=converted,
            stored_bytes=sizes.head,
        ),
    ]  # fmt: skip


def converts_tables(stays: bool, on_gpu: bool, item_bytes: int) -> bool:
    """Whether embeddings and head are converted to the compute dtype when they are loaded.

    A GPU would otherwise convert the whole head in every pass, and in every captured draft step
    anew. Beside layers that are streamed there is no memory to spare for float32. A CPU multiplies
    the head as it is stored, by rows of float32.

    Args:
        item_bytes: of the compute dtype.
    """
    return on_gpu and (stays or item_bytes < FLOAT32_BYTES)


def place(
    mode: OffloadMode,
    target: ModelBytes,
    draft: ModelBytes | None,
    work: Work,
    machine: Machine,
    experts: ExpertPlace = "auto",
) -> Plan:
    """Chooses each layer's tier.

    auto streams what does not fit, on a CPU every layer of a target that is not small; none loads
    the whole target to stay; ram and ssd name the place of what does not stay on a GPU.

    Args:
        experts: beside a GPU, where a mixture's are computed.
    Raises:
        DoesNotFitError: what was asked for does not fit.
        ConfigError: a place was named for experts that do not come one by one.
    """
    if experts != "auto":
        _check_experts(mode, target, machine, experts)
    plan = _placed(mode, target, draft, work, machine, experts)
    usable = machine.usable(machine.ram_bytes)
    if plan.peak_ram_bytes > usable:  # a named mode takes what it takes
        raise DoesNotFitError(
            "the models need {needed} of RAM but {usable} may be used ({parts})",
            plan.peak_ram_bytes, usable, tuple(sorted(plan.ram, key=lambda part: -part[1])),
        )  # fmt: skip
    return _with_replays(plan)


def _with_replays(plan: Plan) -> Plan:
    """The plan, with passes that a GPU replays where all layers stay there and room is left."""
    target, work, machine = plan.target, plan.work, plan.machine
    keeps_more = target.state_elements or work.features is not None or work.eight_bit_kv
    stays = set(plan.tiers) == {"resident"} and not plan.expert_bytes
    if not plan.on_gpu or not stays or keeps_more or machine.triton_obstacle is not None:
        return plan
    if work.texts > 1:
        return plan  # passes over several texts are not replayed
    needed = replay_bytes(target, work)
    if plan.peak_vram_bytes + needed > machine.usable(machine.vram_bytes):
        return plan
    return replace(plan, replays=True, vram=(*plan.vram, ("passes to replay", needed)))


def _check_experts(
    mode: OffloadMode, target: ModelBytes, machine: Machine, experts: ExpertPlace
) -> None:
    """Refuses a place that no plan would heed."""
    reason = ""
    if target.experts is None:
        reason = "the target is no mixture of experts"
    elif not machine.vram_bytes:
        reason = "no GPU computes here, so the CPU has all experts"
    elif mode != "auto":
        reason = f"`offload='{mode}'` moves whole layers"
    if reason:
        raise ConfigError(f"`experts='{experts}'`: {reason}. Leave it at `experts='auto'`")


def _placed(
    mode: OffloadMode,
    target: ModelBytes,
    draft: ModelBytes | None,
    work: Work,
    machine: Machine,
    experts: ExpertPlace,
) -> Plan:
    on_gpu = machine.vram_bytes > 0
    loaded = target.loaded(work.item_bytes)
    if mode == "none" or (
        mode == "auto" and not on_gpu and loaded < machine.ram_bytes // _STAY_SHARE
    ):
        return _all_loaded(target, draft, work, machine)
    if target.experts is not None and not on_gpu and mode != "ram":
        return mixture_plan(mode, target, draft, work, machine)
    if on_gpu and mode == "auto" and target.experts is not None:
        return gpu_mixture_plan(target, draft, work, machine, experts)
    if on_gpu or mode == "auto":
        plan = make_plan(target, draft, work, machine)
        if mode not in ("ram", "ssd"):
            return plan
        # what does not stay on the device comes from there
        tiers: list[Tier] = [mode if tier != "resident" else tier for tier in plan.tiers]
        return plan_of(
            target,
            draft,
            work,
            machine,
            tiers,
            max(2, plan.ssd_buffers),
            max(2, plan.device_buffers),
            kv_layers=plan.kv_layers,
        )
    each: Tier = "ram" if mode == "ram" else "ssd"
    wide = ring_buffers(target, machine)
    plan = plan_of(target, draft, work, machine, [each] * len(target.layers), wide, 0)
    if plan.peak_ram_bytes <= machine.usable(machine.ram_bytes):
        return plan
    return plan_of(target, draft, work, machine, [each] * len(target.layers), 2, 0)


def without_ssd(
    found: Plan, draft: ModelBytes | None, experts: ExpertPlace = "auto"
) -> Plan | None:
    """The plan on the same machine with just enough RAM that no layer stays on the SSD.

    Args:
        experts: where a mixture's are computed in the plan that was found.
    """
    if not found.ssd_bytes or found.others:  # others may have the room as well
        return None
    target, work, machine = found.target, found.work, found.machine
    slack = (len(target.layers) + 1) * HUGE_PAGE_BYTES
    if not found.expert_bytes or target.experts is None:
        enough = machine.ram_for(found.peak_ram_bytes + found.ssd_bytes + slack)
        return make_plan(target, draft, work, replace(machine, ram_bytes=enough))
    # a pass does not move all that is on the SSD, and slots are larger than what they hold
    missing = sum(target.layers) - found.expert_bytes + target.experts.in_all * HUGE_PAGE_BYTES // 8
    enough = machine.ram_for(found.peak_ram_bytes + missing + slack)
    return place("auto", target, draft, work, replace(machine, ram_bytes=enough), experts)


def _all_loaded(target: ModelBytes, draft: ModelBytes | None, work: Work, machine: Machine) -> Plan:
    loaded = target.loaded(work.item_bytes)
    if machine.vram_bytes:
        beside = sum(
            size
            for _, size in gpu_parts(target, draft, work, machine.context_bytes, table_in_ram=False)
        )
        needed = beside + loaded - target.resident
        if needed > machine.usable(machine.vram_bytes):
            raise DoesNotFitError(
                "target and draft model need {needed} of GPU memory but {usable} are free",
                needed, machine.vram_bytes, (("target in VRAM", loaded),),
            )  # fmt: skip
    elif loaded > machine.ram_bytes:
        raise DoesNotFitError(
            "target needs {needed} of RAM but {usable} are free",
            loaded, machine.ram_bytes, (("target in RAM", loaded),),
        )  # fmt: skip
    tiers: list[Tier] = ["resident"] * len(target.layers)
    return plan_of(target, draft, work, machine, tiers, 0, 0, stays=True)


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
    if copy_s <= machine.host_s(experts.largest, target.packed_bits):
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
