"""What bench_offload.py measures: its settings, the models opened, and the plan they follow."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from offload_measure import PREFIX_TOKENS, Measure, RawReader, room_for

from specexec_cli.config import DtypeName, TreeConfig
from specexec_cli.device import total_ram_bytes
from specexec_cli.errors import ConfigError
from specexec_cli.models.checkpoint_info import eos_token_ids
from specexec_cli.models.skeleton import load_config
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.compute import FlopsByRows
from specexec_cli.offload.demand import fixed_parts
from specexec_cli.offload.plan import Machine, Plan, Work, make_plan, slot_bytes
from specexec_cli.offload.sizes import ModelBytes, checkpoint_bytes
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.offload.stream import Tier
from specexec_cli.opening import pick_dtype

DEMO = Path(__file__).parents[1] / "specexec_cli" / "demo"
RING_SLOTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is measured."""

    rig: Path
    draft: Path
    cap_bytes: int | None
    in_ram: str  # "none": every layer comes from the SSD; "plan": as many stay as the plan says
    dtype: str
    rows: tuple[int, ...]
    repeats: int
    steps: int  # iterations per method and repeat, the first not counted
    budget: int
    depth: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if min(*self.rows, self.repeats, self.steps) < 1:
            raise ConfigError("--rows, --repeats and --steps must be 1 or more")

    @property
    def tree(self) -> TreeConfig:
        return TreeConfig(budget=self.budget, max_depth=self.depth, batch=self.batch)

    @property
    def all_rows(self) -> list[int]:
        """With those of a full tree and of plain decoding."""
        return sorted({1, *self.rows, self.budget + 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The opened models and what was planned for them."""

    config: Config
    measure: Measure
    raw: RawReader
    prompts: list[list[int]]
    eos: frozenset[int]
    sizes: tuple[ModelBytes, ModelBytes]
    context_tokens: int
    dtype: torch.dtype
    plan: Plan

    @classmethod
    def open(cls, config: Config) -> Setup:
        """Open target and draft model as planned.

        Raises:
            SpecexecError: whatever is wrong.
        """
        checkpoint = read_checkpoint(config.rig)
        model_config = load_config(config.rig)
        cpu = torch.device("cpu")
        dtype = pick_dtype(
            cast(DtypeName, config.dtype), cpu, checkpoint.total_bytes, model_config.dtype
        )
        sizes = (_sizes(config.rig), _sizes(config.draft))
        words = load_tokenizer(config.rig)
        prompts = [list(words.encode(text)) for text in _prompts(config.seed)]
        context = most_tokens(config, prompts)
        plan = plan_for(config, sizes, dtype, context)
        draft = StreamedModel.open(config.draft, device=cpu, dtype=dtype, tiers=None)
        target = StreamedModel.open(
            config.rig, device=cpu, dtype=dtype, tiers=cast(list[Tier], plan.tiers),
            slots=plan.ssd_slots, notice=tell,
        )  # fmt: skip
        return cls(
            config=config,
            measure=Measure(target, draft, config.seed),
            raw=RawReader(sorted({tensor.path for tensor in checkpoint.values()})),
            prompts=prompts,
            context_tokens=context,
            eos=eos_token_ids(config.rig, model_config, words),
            sizes=sizes,
            plan=plan,
            dtype=dtype,
        )

    def plan_at(self, ssd_bytes_per_s: float, flops: FlopsByRows) -> Plan:
        """The plan with rates known."""
        return plan_for(self.config, self.sizes, self.dtype, self.context_tokens,
                        ssd_bytes_per_s, flops)  # fmt: skip

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
    """What the planner says about this target in this memory.

    Raises:
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
    if config.in_ram == "none":
        # just enough for the ring alone
        beside = machine.base_bytes + sum(size for _, size in fixed_parts(*sizes, work))
        needed = (beside + RING_SLOTS * slot_bytes(sizes[0].layers)) / (1 - machine.margin)
        if needed < machine.ram_bytes:
            machine = replace(machine, ram_bytes=int(needed) + 1)
    return make_plan(*sizes, work, machine)


def most_tokens(config: Config, prompts: list[list[int]]) -> int:
    """Longest text and prompt of this run, in tokens, or rows of a pass behind its prefix."""
    used = prompts[: config.repeats]
    decoding = max(map(len, used)) + room_for(config.steps, config.tree)
    return max(decoding, PREFIX_TOKENS + max(config.all_rows) - config.budget)


def _sizes(folder: Path) -> ModelBytes:
    config = json.loads((folder / "config.json").read_text())
    return checkpoint_bytes(read_checkpoint(folder), config)


def _prompts(seed: int) -> list[str]:
    """Code to complete that the demo pair was not trained on, in an order of the seed's."""
    held_out = json.loads((DEMO / "heldout_prompts.json").read_text())
    texts = [item["prompt"] for item in held_out if item["kind"] == "code"]
    random.Random(seed).shuffle(texts)
    return texts
