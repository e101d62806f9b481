"""The settings of bench_offload.py, its opened models, and the plan that they follow."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from offload_measure import PREFIX_TOKENS, Measure, RawLink, RawReader, room_for

from specexec_cli.config import DtypeName, Tier, TreeConfig
from specexec_cli.device import format_bytes, total_ram_bytes
from specexec_cli.errors import ConfigError
from specexec_cli.loading import pick_device
from specexec_cli.models.arithmetic_probe import probe_layer
from specexec_cli.models.checkpoint_info import eos_token_ids
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.skeleton import load_config
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.slabs import SLAB_BYTES
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.dtype_choice import compute_dtype
from specexec_cli.planning.machine import Machine
from specexec_cli.planning.machine_rates import FlopsByRows
from specexec_cli.planning.memory import Work, fixed_parts, gpu_parts
from specexec_cli.planning.pass_time import knee_rows
from specexec_cli.planning.sizes import ModelBytes, checkpoint_bytes
from specexec_cli.planning.tiers import Plan, buffer_bytes, make_plan, plan_of

DEMO = Path(__file__).parents[1] / "specexec_cli" / "demo"
RING_BUFFERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is measured."""

    rig: Path
    draft: Path
    device: str
    tier: Tier  # where streamed layers come from; on a CPU, the SSD
    cap_bytes: int | None
    # "none": every layer is streamed; "plan": as many are resident as the plan says; "thirds": on a
    # GPU a third of the layers is resident, a third in RAM, and a third on the SSD
    keep: str
    dtype: str
    rows: tuple[int, ...]
    repeats: int
    steps: int  # iterations of each method and repeat; the first is not counted
    budget: int
    depth: int
    batch: int
    raw_memory_bytes: int  # memory of the buffers of raw reads
    seed: int

    def __post_init__(self) -> None:
        if min(*self.rows, self.repeats, self.steps) < 1:
            raise ConfigError("--rows, --repeats and --steps must be 1 or more")
        if self.device == "cpu" and self.tier == "ram":
            raise ConfigError("--tier ram: a CPU streams from the SSD alone. Try --device cuda")
        if self.keep == "thirds" and (self.device == "cpu" or self.tier == "ram"):
            raise ConfigError("--keep thirds: needs --device cuda and --tier ssd")

    @property
    def tree(self) -> TreeConfig:
        return TreeConfig(budget=self.budget, max_depth=self.depth, batch=self.batch)

    @property
    def all_rows(self) -> list[int]:
        """The numbers of rows to time, with those of a full tree and of plain decoding."""
        return sorted({1, *self.rows, self.budget + 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The opened models and what was planned for them."""

    config: Config
    measure: Measure
    raw: RawReader | RawLink
    prompts: list[list[int]]
    eos: frozenset[int]
    sizes: tuple[ModelBytes, ModelBytes]
    context_tokens: int
    dtype: torch.dtype
    plan: Plan

    @classmethod
    def open(cls, config: Config) -> Setup:
        """Opens target and draft model as planned.

        Raises:
            SpecexecError: says what is wrong.
        """
        checkpoint = read_checkpoint(config.rig)
        model_config = load_config(checkpoint)
        device = pick_device(config.device)
        stored = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"))
        name = compute_dtype(
            cast(DtypeName, config.dtype), device.type, stored, checkpoint.total_bytes
        )
        dtype = getattr(torch, name)
        draft_checkpoint = read_checkpoint(config.draft)
        sizes = (checkpoint_bytes(checkpoint), checkpoint_bytes(draft_checkpoint))
        words = load_tokenizer(config.rig)
        prompts = [list(words.encode(text)) for text in _prompts(config.seed)]
        context = most_tokens(config, prompts)
        plan = plan_for(config, sizes, dtype, context)
        draft = ModelSpec(device=device, dtype=dtype, tiers=None, own_rows=False).open(
            draft_checkpoint
        )
        target = ModelSpec(
            device=device,
            dtype=dtype,
            tiers=plan.tiers,
            buffers=max(2, plan.ssd_buffers),
            device_buffers=max(2, plan.device_buffers),
        ).open(checkpoint, notice=tell)
        raw = (
            RawLink(device, max(sizes[0].layers), plan.link_bytes)
            if config.tier == "ram"
            else RawReader(checkpoint.files, config.raw_memory_bytes)
        )
        return cls(
            config=config,
            measure=Measure(target, draft, config.seed, context + config.budget + 1),
            raw=raw,
            prompts=prompts,
            context_tokens=context,
            eos=eos_token_ids(config.rig, model_config, words),
            sizes=sizes,
            plan=plan,
            dtype=dtype,
        )

    def planned_knee(self, ssd_bytes_per_s: float, flops: FlopsByRows) -> int | None:
        """The most rows that take no longer than the SSD's stream, by the plan and these rates."""
        plan = plan_for(self.config, self.sizes, self.dtype, self.context_tokens,
                        ssd_bytes_per_s, flops)  # fmt: skip
        # passes are measured behind a prefix of this length, and a plan takes half of the context
        work = replace(plan.work, context_tokens=2 * PREFIX_TOKENS)
        cost = probe_layer(str(self.dtype).removeprefix("torch."))
        return knee_rows(replace(plan, work=work, machine=replace(plan.machine, layer_cost=cost)))

    def close(self) -> None:
        self.measure.close()
        self.raw.close()


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def plan_for(
    config: Config,
    sizes: tuple[ModelBytes, ModelBytes],
    dtype: torch.dtype,
    context_tokens: int,
    ssd_bytes_per_s: float = 2e9,
    flops: FlopsByRows = (),
) -> Plan:
    """The plan for this target in this memory.

    Raises:
        ConfigError: nothing would be streamed, or --tier asks for more RAM than there is.
        OutOfMemoryError: it does not fit.
    """
    work = Work(
        context_tokens=context_tokens, budget=config.budget, chunk_rows=max(config.all_rows),
        item_bytes=dtype.itemsize,
    )  # fmt: skip
    machine = Machine(
        ram_bytes=config.cap_bytes or total_ram_bytes(),
        ssd_bytes_per_s=ssd_bytes_per_s,
        flops=flops,
    )
    beside = sum(size for _, size in fixed_parts(*sizes, work))
    rings = RING_BUFFERS * buffer_bytes(sizes[0].layers)
    gpu = pick_device(config.device).type == "cuda"
    if gpu:
        free, _ = torch.cuda.mem_get_info(torch.device(config.device))
        # just enough memory for the ring
        beside_vram = sum(size for _, size in gpu_parts(*sizes, work))
        enough = _with_margin(beside_vram + rings, machine)
        machine = replace(machine, vram_bytes=min(free, enough) if config.keep == "none" else free)
    if config.tier == "ssd" and config.keep != "thirds" and (gpu or config.keep == "none"):
        held = sizes[0].table + SLAB_BYTES if gpu else beside
        enough = machine.ram_for(machine.base_bytes + held + rings)
        machine = replace(machine, ram_bytes=min(machine.ram_bytes, enough))
    if config.keep == "thirds":
        cycle: list[Tier] = ["resident", "ram", "ssd"]
        tiers = [cycle[index % 3] for index in range(len(sizes[0].layers))]
        return plan_of(*sizes, work, machine, tiers, RING_BUFFERS, RING_BUFFERS)
    plan = make_plan(*sizes, work, machine)
    if config.tier == "ram" and plan.ssd_bytes:
        raise ConfigError(f"--tier ram: the target needs {format_bytes(sizes[0].total)} of RAM")
    if not plan.ssd_bytes + plan.link_bytes:
        raise ConfigError(
            "nothing of the rig is streamed in this memory: try a smaller --cap, or a rig of more "
            "layers"
        )
    return plan


def _with_margin(n_bytes: int, machine: Machine) -> int:
    """The memory size of which a plan may use this many bytes."""
    return int(n_bytes / (1 - machine.margin)) + 1


def most_tokens(config: Config, prompts: list[list[int]]) -> int:
    """The most tokens of a text of this run with its prompt, or of a timed pass with its prefix."""
    used = prompts[: config.repeats]
    decoding = max(map(len, used)) + room_for(config.steps, config.tree)
    return max(decoding, PREFIX_TOKENS + max(config.all_rows) - config.budget)


def _prompts(seed: int) -> list[str]:
    """Prompts of code that the demo pair was not trained on, in an order given by the seed."""
    held_out = json.loads((DEMO / "heldout_prompts.json").read_text())
    texts = [item["prompt"] for item in held_out if item["kind"] == "code"]
    random.Random(seed).shuffle(texts)
    return texts
