"""Measure streaming against its physical floor, on a model larger than the memory it may use.

    python scripts/make_rig.py --shape llama2-7b --out /var/tmp/rig-7b
    python scripts/bench_offload.py --rig /var/tmp/rig-7b --cap 4GB
    python scripts/bench_offload.py --rig /var/tmp/rig-7b --device cuda --tier ram
    python scripts/make_rig.py --shape qwen3.8-27b --layers 8 --out /var/tmp/rig-27b
    python scripts/bench_offload.py --rig /var/tmp/rig-27b --cap 7GB --rows 1,64,256

The floor of a pass is max(bytes streamed / raw rate, arithmetic alone), the raw rate being that of
the bare files, or of bare copies from pinned memory to the GPU. All of it is measured in this run
and in turns, so that a machine that slows down for a while slows everything down. A ratio is taken
with the raw rate measured just before and just after. Prints a table; the last line is JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from capped_bench import cap_bytes, rig_parser, run_and_show
from memory_cap import KIND_VARIABLE, cgroup_peak_bytes
from offload_report import Samples, environment, results, show
from offload_setup import Config, Setup, tell

from specexec_cli.cli.machine import parse_bytes
from specexec_cli.config import Method
from specexec_cli.device import peak_ram_bytes
from specexec_cli.models.arithmetic_probe import probe_arithmetic

Measured = TypeVar("Measured")
METHODS: tuple[Method, ...] = ("autoregressive", "specexec")
RAW_SHARE = 0.125  # of the files, read before and after each streamed measurement
ENOUGH_S = 90.0  # a long measurement is not repeated beyond this, once there are two


@dataclass(slots=True)
class Bench:
    """Rounds over a setup, and what they gave."""

    setup: Setup
    samples: Samples = field(default_factory=Samples)

    def round(self, number: int) -> None:
        """Everything once, in turns."""
        setup, config, samples = self.setup, self.setup.config, self.samples
        tell(f"round {number + 1}/{config.repeats}: streaming only")
        samples.stream.append(self.beside_raw(setup.measure.streaming_pass))
        for rows in config.all_rows:
            if _enough([seconds for seconds, _ in samples.passes[rows]]):
                continue
            tell(f"round {number + 1}/{config.repeats}: {rows} rows")
            samples.compute[rows].append(setup.measure.compute_alone(rows))
            samples.passes[rows].append(self.beside_raw(partial(setup.measure.streamed_pass, rows)))
        prompt = setup.prompts[number % len(setup.prompts)]
        for method in METHODS:
            tell(f"round {number + 1}/{config.repeats}: {method}")
            decode = partial(
                setup.measure.iterations,
                method, prompt, config.steps, config.tree, setup.eos,
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
        self.setup.measure.wait_for_full_ring()  # nothing else reads now
        return self.setup.raw.read(RAW_SHARE)


def _enough(times: list[float]) -> bool:
    return len(times) >= 2 and sum(times) > ENOUGH_S


def run(config: Config) -> dict[str, Any]:
    """All rounds, then the results."""
    setup = Setup.open(config)
    bench = Bench(setup)
    try:
        for number in range(config.repeats):
            bench.round(number)
    finally:
        setup.close()
    memory = {
        "cap_bytes": config.cap_bytes,
        "cap_kind": os.environ.get(KIND_VARIABLE),
        "peak_rss_bytes": peak_ram_bytes(),
        "cgroup_peak_bytes": cgroup_peak_bytes() if config.cap_bytes else None,
        "planned_bytes": setup.plan.peak_ram_bytes,
        "bench_bytes": setup.measure.held_bytes,
        "peak_vram_bytes": None,
        "planned_vram_bytes": setup.plan.peak_vram_bytes or None,
    }
    found = results(bench.samples, setup.sizes[0], setup.plan, config.budget)
    found["knee"]["planned_rows"] = None  # the arithmetic of a GPU is not probed
    if config.device == "cpu":
        linear_flops = probe_arithmetic(
            str(setup.dtype).removeprefix("torch."), setup.sizes[0].packed_bits
        )
        raw = found["raw"]["bytes_per_s"]["p50"]
        found["knee"]["planned_rows"] = setup.planned_knee(raw, linear_flops)
    else:
        free, total = torch.cuda.mem_get_info(config.device)  # torch gives nothing back meanwhile
        memory["peak_vram_bytes"] = total - free
    return {
        **environment(config.rig, config.seed),
        "config": {**asdict(config), "rig": str(config.rig), "draft": str(config.draft),
                   "compute_dtype": str(setup.dtype).removeprefix("torch."),
                   "direct_reads": setup.raw.direct,
                   "layers_in_ram": setup.plan.tiers.count("ram"),
                   "layers_resident": setup.plan.tiers.count("resident")},
        **found,
        "memory": memory,
    }  # fmt: skip


def parse(argv: list[str]) -> Config:
    """Options as a Config."""
    parser = rig_parser(__doc__, "of make_rig.py, in any of its formats, or a GGUF file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tier", choices=("ssd", "ram"), default="ssd",
                        help="where a GPU's layers are streamed from")  # fmt: skip
    parser.add_argument("--cap", default=None, metavar="SIZE",
                        help="RAM limit, or none; default: 4GB, on a GPU none")  # fmt: skip
    parser.add_argument(
        "--keep", choices=("none", "plan", "thirds"), default="none",
        help="stream every layer, or keep as many in memory as the planner says; thirds: on a GPU, "
             "a third of the layers on it, in RAM and on the SSD each",
    )  # fmt: skip
    parser.add_argument("--dtype", default="auto", help="to compute in")
    parser.add_argument("--rows", default="1,16,64,128,256,512", metavar="N,...")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="iterations per method and repeat")
    parser.add_argument("--budget", type=int, default=64, help="of the draft tree")
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--raw-memory", default="16MB", metavar="SIZE",
                        help="memory that raw reads go through; a ring has more")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few rows, two repeats")
    args = parser.parse_args(argv)
    if args.quick:
        args.rows, args.repeats, args.steps = "1,16", 2, 2
    if args.cap is None:
        args.cap = "4GB" if args.device == "cpu" else "none"
    try:
        rows = tuple(int(part) for part in args.rows.split(","))
    except ValueError:
        parser.error(f"--rows {args.rows}: numbers with commas between them are needed")
    return Config(
        rig=args.rig, draft=args.draft, device=args.device, tier=args.tier, keep=args.keep,
        dtype=args.dtype, rows=rows,
        cap_bytes=cap_bytes(args.cap),
        repeats=args.repeats, steps=args.steps, budget=args.budget, depth=args.depth,
        batch=args.batch, seed=args.seed,
        raw_memory_bytes=parse_bytes(args.raw_memory, "--raw-memory"),
    )  # fmt: skip


def main(argv: list[str]) -> int:
    return run_and_show(__file__, argv, parse, run, show)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
