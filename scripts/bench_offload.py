"""Measure streaming against its physical floor, on a model larger than the memory it may use.

    python scripts/make_rig.py --shape llama2-7b --out /var/tmp/rig-7b
    python scripts/bench_offload.py --rig /var/tmp/rig-7b --cap 4GB

The floor of a pass is max(bytes streamed / raw read rate, arithmetic alone), all of it measured in
this run and in turns, so that a machine that slows down for a while slows everything down. A ratio
is taken with the raw rate measured just before and just after. Prints a table; the last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from memory_cap import KIND_VARIABLE, cgroup_peak_bytes, run_capped
from offload_measure import PREFIX_TOKENS, Measure, RawReader, room_for
from offload_report import Samples, environment, results, show

from specexec_cli.cli.plan import parse_bytes
from specexec_cli.config import DtypeName, Method, TreeConfig
from specexec_cli.device import peak_ram_bytes, total_ram_bytes
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, ConfigError, SpecexecError
from specexec_cli.models.checkpoint_info import eos_token_ids
from specexec_cli.models.linear import mixed_linear
from specexec_cli.models.skeleton import load_config
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.compute import FlopsByRows
from specexec_cli.offload.demand import fixed_parts
from specexec_cli.offload.plan import Machine, Plan, Work, make_plan, slot_bytes
from specexec_cli.offload.probe import probe_flops
from specexec_cli.offload.sizes import ModelBytes, checkpoint_bytes
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.offload.stream import Tier
from specexec_cli.opening import pick_dtype

DEMO = Path(__file__).parents[1] / "specexec_cli" / "demo"
Measured = TypeVar("Measured")
METHODS: tuple[Method, ...] = ("autoregressive", "specexec")
RING_SLOTS = 3
RAW_SHARE = 0.125  # of the files, read before and after each streamed measurement
ENOUGH_S = 90.0  # a long measurement is not repeated beyond this, once there are two


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


@dataclass(slots=True)
class Bench:
    """The opened models and what was planned for them."""

    config: Config
    measure: Measure
    raw: RawReader
    prompts: list[list[int]]
    eos: frozenset[int]
    sizes: tuple[ModelBytes, ModelBytes]
    plan: Plan
    context_tokens: int
    samples: Samples = field(default_factory=Samples)
    dtype: torch.dtype = torch.float32

    def round(self, number: int) -> None:
        """Everything once, in turns."""
        samples = self.samples
        tell(f"round {number + 1}/{self.config.repeats}: streaming only")
        samples.stream.append(self.beside_raw(self.measure.streaming_pass))
        for rows in self.config.all_rows:
            if _enough([seconds for seconds, _ in samples.passes[rows]]):
                continue
            tell(f"round {number + 1}/{self.config.repeats}: {rows} rows")
            samples.compute[rows].append(self.measure.compute_alone(rows))
            samples.passes[rows].append(self.beside_raw(partial(self.measure.streamed_pass, rows)))
        prompt = self.prompts[number % len(self.prompts)]
        for method in METHODS:
            tell(f"round {number + 1}/{self.config.repeats}: {method}")
            decode = partial(
                self.measure.iterations,
                method, prompt, self.config.steps, self.config.tree, self.eos,
            )  # fmt: skip
            (first_s, steps), rate = self.beside_raw(decode)
            samples.first_s[method].append(first_s)
            samples.steps[method] += [(seconds, rate, step) for step, seconds in steps[1:]]
            tokens = [token for step, _ in steps for token in step.tokens]
            samples.texts[method].append(tuple(tokens))

    def beside_raw(self, measure: Callable[[], Measured]) -> tuple[Measured, float]:
        """A measurement, and the rate of the bare files just before and just after it."""
        n_bytes, total_s = self._read_raw()
        measured = measure()
        n_bytes_after, after_s = self._read_raw()
        rate = (n_bytes + n_bytes_after) / (total_s + after_s)
        self.samples.raw.append(rate)
        return measured, rate

    def _read_raw(self) -> tuple[int, float]:
        self.measure.wait_for_full_ring()  # nothing else reads now
        return self.raw.read(RAW_SHARE)


def _enough(times: list[float]) -> bool:
    return len(times) >= 2 and sum(times) > ENOUGH_S


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


def open_bench(config: Config) -> Bench:
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
    return Bench(
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


def run(config: Config) -> dict[str, Any]:
    """All rounds, then the results."""
    bench = open_bench(config)
    try:
        for number in range(config.repeats):
            bench.round(number)
    finally:
        bench.measure.close()
        bench.raw.close()
    memory = {
        "cap_bytes": config.cap_bytes,
        "cap_kind": os.environ.get(KIND_VARIABLE),
        "peak_rss_bytes": peak_ram_bytes(),
        "cgroup_peak_bytes": cgroup_peak_bytes() if config.cap_bytes else None,
        "planned_bytes": bench.plan.peak_ram_bytes,
    }
    found = results(bench.samples, bench.sizes[0], bench.plan, config.budget)
    linear_flops = probe_flops(
        torch.bfloat16, bench.dtype, lambda rows, weight: mixed_linear(rows, weight, None)
    )
    told = plan_for(config, bench.sizes, bench.dtype, bench.context_tokens,
                    found["raw"]["bytes_per_s"]["p50"], linear_flops)  # fmt: skip
    found["knee"]["planned_rows"] = told.knee_rows
    return {
        **environment(config.rig, config.seed),
        "config": {**asdict(config), "rig": str(config.rig), "draft": str(config.draft),
                   "compute_dtype": str(bench.dtype).removeprefix("torch."),
                   "direct_reads": bench.raw.direct,
                   "layers_in_ram": bench.plan.tiers.count("ram")},
        **found,
        "memory": memory,
    }  # fmt: skip


def parse(argv: list[str]) -> Config:
    """Options as a Config."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rig", type=Path, required=True, metavar="DIR", help="of make_rig.py")
    parser.add_argument("--draft", type=Path, default=DEMO / "draft", metavar="DIR")
    parser.add_argument("--cap", default="4GB", metavar="SIZE", help="memory limit, or none")
    parser.add_argument(
        "--in-ram", choices=("none", "plan"), default="none",
        help="stream every layer, or keep as many in RAM as the planner says",
    )  # fmt: skip
    parser.add_argument("--dtype", default="auto", help="to compute in")
    parser.add_argument("--rows", default="1,16,64,128,256,512", metavar="N,...")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="iterations per method and repeat")
    parser.add_argument("--budget", type=int, default=64, help="of the draft tree")
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few rows, two repeats")
    args = parser.parse_args(argv)
    if args.quick:
        args.rows, args.repeats, args.steps = "1,16", 2, 2
    try:
        rows = tuple(int(part) for part in args.rows.split(","))
    except ValueError:
        parser.error(f"--rows {args.rows}: numbers with commas between them are needed")
    return Config(
        rig=args.rig, draft=args.draft, in_ram=args.in_ram, dtype=args.dtype, rows=rows,
        cap_bytes=None if args.cap == "none" else parse_bytes(args.cap, "--cap"),
        repeats=args.repeats, steps=args.steps, budget=args.budget, depth=args.depth,
        batch=args.batch, seed=args.seed,
    )  # fmt: skip


def main(argv: list[str]) -> int:
    try:
        config = parse(argv)
        if config.cap_bytes and KIND_VARIABLE not in os.environ:
            return run_capped([sys.executable, __file__, *argv], config.cap_bytes)
        report = run(config)
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    show(report)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
