"""Times passes and iterations of a packed target on a GPU beside what the plan says of each part.

    python scripts/first_gpu_passes.py RIG [--rows 1,16,64,128,129] [--draft demo-draft]

For each number of rows: the seconds of a pass, those in which the host starts it, those in which
the GPU computes, its kernels and waits; and which kernels take longest, with the share of the
memory's rate at which they read and write weights, where weights are what they move, and of the
tensor rate at which they multiply. Then the seconds of an iteration, a tree of NODES nodes grown
and verified, and of its drafting. The plan is made of the rates that are measured here first.
Lines say which of its points proved right, that is within a quarter; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from first_gpu_report import Check
from first_gpu_steps import DEMO, decoded
from torch.profiler import ProfilerActivity, profile, supported_activities

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.models.gpu_probe import probe_gpu
from specexec_cli.planning.machine_rates import BLOCK, PROBED_ROWS, GpuRates
from specexec_cli.planning.pass_time import PassTime, pass_time, planned_launches
from specexec_cli.planning.request import TreeRequest
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.planning.speed import TokensPerPass, with_trees
from specexec_cli.planning.tiers import Plan
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession
from specexec_cli.verify.verifier import LocalTarget

DEVICE = torch.device("cuda", 0)
PREFIX = 64  # tokens in the cache before a timed pass
REPEATS = 6
NODES = 127  # of an iteration's tree: with its root the most rows that are multiplied together
TREE = TreeConfig(budget=NODES, max_depth=16, batch=32)
ITERATIONS = 12
SHOWN = 8  # kernels that take longest
RIGHT = 1.25  # a point of the plan is right where it is off by no more than this factor
_LIBRARY_PRODUCTS = ("gemm", "cutlass", "nvjet", "wgmma")  # in names of libraries' kernels
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True, slots=True)
class Passes:
    """What passes of so many rows took."""

    rows: int
    pass_s: float  # median, until the GPU has done all of it
    host_s: float  # median, until the host has started all of it
    busy_s: float  # of the GPU's kernels together
    kernels: dict[str, tuple[int, float]]  # name -> how often, seconds together
    waits: int

    @property
    def started(self) -> int:
        """How many kernels and copies were started."""
        return sum(count for count, _ in self.kernels.values())


def measured(target: LocalTarget, rows: int, repeats: int = REPEATS) -> Passes:
    """Times passes over the last token and a tree behind a short prefix, as sessions make them, and
    looks into one of them."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, target.model.vocab_size, PREFIX + rows)
    nodes = np.arange(rows - 1)
    parents = (nodes - 1) // 2  # of a tree that branches in two
    depths = np.log2(nodes + 1).astype(np.int64) + 1
    tree = DraftTree(tokens[PREFIX + 1 :], parents, depths, np.zeros(rows - 1))
    target.crop(0)
    target.verify(tokens[:PREFIX].tolist(), DraftTree.empty())
    target.commit([])

    def begin() -> float:
        target.crop(PREFIX)
        torch.cuda.synchronize()
        return time.perf_counter()

    def run() -> tuple[float, float]:
        began = begin()
        target.verify([int(tokens[PREFIX])], tree)
        host_s = time.perf_counter() - began
        torch.cuda.synchronize()
        return time.perf_counter() - began, host_s

    times = [run() for _ in range(repeats + 1)][1:]
    begin()
    wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(supported_activities())
    with profile(activities=wanted) as seen:
        target.verify([int(tokens[PREFIX])], tree)
        torch.cuda.synchronize()
    kernels: dict[str, tuple[int, float]] = {}
    waits = 0
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, seconds = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = count + 1, seconds + event.device_time / 1e6
        waits += event.name in _WAITS
    return Passes(
        rows, median(pass_s for pass_s, _ in times), median(host_s for _, host_s in times),
        sum(seconds for _, seconds in kernels.values()), kernels, waits,
    )  # fmt: skip


def multiplies(name: str) -> bool:
    """Whether kernels of a name multiply rows with weights: ours, or a library's."""
    return "_product_kernel" in name.lower() or _of_library(name)


def _of_library(name: str) -> bool:
    return any(word in name.lower() for word in _LIBRARY_PRODUCTS)


def share_of_products(name: str, found: Passes) -> float:
    """Of a pass's products, those that kernels of a name made: by how many calls they had.

    A product is taken to be as large as any other of the pass.
    """
    calls = {each: count for each, (count, _) in found.kernels.items() if multiplies(each)}
    return calls.get(name, 0) / sum(calls.values()) if calls else 0.0


def product_flops(name: str, sizes: ModelBytes, found: Passes) -> float:
    """Operations of the products that kernels of a name make in a pass; 0 for others."""
    weights = sizes.active_params + sizes.vocab * sizes.hidden  # every row goes through the head
    return 2.0 * weights * found.rows * share_of_products(name, found)


def weight_bytes(name: str, sizes: ModelBytes, found: Passes) -> float:
    """Bytes of weights that kernels of a name move in a pass; 0 where they move others.

    Args:
        name: of a kernel, by which ours and those of libraries are told apart.
    """
    packed, experts = sum(sizes.layers), sizes.experts
    if "unpack" in name.lower():
        return packed + 2 * sizes.layer_params
    asked = experts.asked_for(found.rows) / sum(experts.layers) if experts else 1.0
    others = 1.0 - sum(experts.layers) / packed if experts else 0.0
    weights = (others + asked * (1.0 - others)) * sizes.layer_params + sizes.vocab * sizes.hidden
    bytes_of_one = 2.0 if _of_library(name) else packed / sizes.layer_params
    blocks = -(-found.rows // BLOCK)
    return weights * bytes_of_one * blocks * share_of_products(name, found)


def show(found: Passes, told: PassTime, sizes: ModelBytes, rates: GpuRates) -> None:
    """Prints what was found of one number of rows."""
    print(
        f"\n{found.rows} rows: pass {found.pass_s * 1e3:.2f} ms (plan {told.seconds * 1e3:.2f}), "
        f"host {found.host_s * 1e3:.2f} (plan {told.starting_s * 1e3:.2f}), GPU busy "
        f"{found.busy_s * 1e3:.2f}, {found.started} kernels, {found.waits} waits"
    )
    longest = sorted(found.kernels.items(), key=lambda item: -item[1][1])[:SHOWN]
    for name, (count, seconds) in longest:
        n_bytes = weight_bytes(name, sizes, found)
        share = n_bytes / seconds / rates.memory_bytes_per_s if seconds else 0.0
        told_share = f"{share:6.0%} of the memory's rate" if n_bytes else ""
        flops = product_flops(name, sizes, found)
        if flops and seconds:
            told_share += f", {flops / seconds / rates.tensor_flops:.0%} of the tensor rate"
        print(f"  {count:6d} {seconds * 1e3:9.3f} ms  {name[:60]:<60} {told_share}", flush=True)


def points(plan: Plan, found: Sequence[Passes]) -> list[Check]:
    """Which points of a plan proved right: one line each."""
    checks = []
    for each in found:
        told = pass_time(plan, each.rows)
        launches = planned_launches(plan, each.rows)
        device_s = max(told.memory_s, told.compute_s) + told.layers_s
        counted = launches.operations + launches.kernels
        name = f"{each.rows} rows"
        checks += [
            point(f"{name}, pass", each.pass_s, told.seconds, "ms", 1e3),
            point(f"{name}, GPU busy", each.busy_s, device_s, "ms", 1e3),
            point(f"{name}, host", each.host_s, told.starting_s, "ms", 1e3),
            point(f"{name}, kernels started", each.started, counted, "", 1),
            point(f"{name}, waits", each.waits, launches.waits, "", 1, beyond=2),
        ]
    by_rows = {each.rows: each.pass_s for each in found}
    if {128, 129} <= set(by_rows):
        told_ratio = pass_time(plan, 129).seconds / pass_time(plan, 128).seconds
        ratio = by_rows[129] / by_rows[128]
        checks.append(point("129 rows over 128", ratio, told_ratio, "", 1))
    return checks


def iterations(session: LocalSession, count: int) -> list[StepResult]:
    """Iterations that grew whole trees, behind a text that warms them up.

    Args:
        count: of iterations, the last of each text and its first, with the prompt, left out.
    """
    found: list[StepResult] = []
    prompts = json.loads((DEMO / "heldout_prompts.json").read_text())
    for number, prompt in enumerate(each["prompt"] for each in prompts):
        steps = decoded(session, prompt, TREE, 8 * TREE.max_depth)
        if number:
            found += [step for step in steps[1:-1] if step.tree_nodes == NODES]
        if len(found) >= count:
            break
    return found


def iteration_points(plan: Plan, draft: ModelBytes, found: Sequence[StepResult]) -> list[Check]:
    """Whether the plan's iteration and its drafting proved right.

    Without a check where nothing was measured: what is claimed of them is then not judged.
    """
    name = f"{NODES} nodes"
    if not found:
        print(f"no text had a tree of {name}: iterations are not judged", flush=True)
        return []
    tau = sum(len(step.tokens) for step in found) / len(found)
    rate = TokensPerPass(tau, tau, tau, "measured here")
    told = with_trees(plan, draft, TREE, NODES, rate).usual
    iteration_s = median(step.draft_s + step.verify_s for step in found)
    draft_s = median(step.draft_s for step in found)
    return [
        point(f"{name}, iteration", iteration_s, told.pass_s + told.draft_s, "ms", 1e3),
        point(f"{name}, drafting", draft_s, told.draft_s, "ms", 1e3),
        Check("tokens an iteration", True, f"{tau:.1f}, of {len(found)} iterations"),
    ]


def point(
    name: str, found: float, told: float, unit: str, scale: float, beyond: float = 0.0
) -> Check:
    """One figure beside the plan's.

    Args:
        beyond: by which it may be off in any case.
    """
    low, high = sorted((found, told))
    right = high <= RIGHT * low or high - low <= beyond
    verdict = "right" if right else "wrong"
    words = f"{found * scale:.4g} {unit}".strip()
    return Check(f"the plan's {name}", right, f"{verdict}: {words}",
                 f"the plan says {told * scale:.4g} {unit}".strip())  # fmt: skip


def passes_step(
    rig: Path,
    rows: Sequence[int],
    rates: GpuRates,
    repeats: int = REPEATS,
    draft: str | None = "demo-draft",
    count: int = ITERATIONS,
) -> list[Check]:
    """Opens the rig as a session does, times its passes and iterations and compares them with its
    plan.

    Args:
        rates: of this GPU, measured just now.
        draft: a model with the rig's tokenizer; without one no iterations are timed.
        count: of iterations.
    """
    options: dict[str, Any] = {"method": "autoregressive"}
    if draft:
        tree = TreeRequest(budget=NODES, depth=TREE.max_depth, batch=TREE.batch, policy="fixed")
        options = {"draft": draft, "tree": tree}
    with Session.open(
        model=str(rig), device=str(DEVICE), context_tokens=1024, **options
    ) as session:
        assert isinstance(session, LocalSession)
        machine = replace(
            session.decision.plan.machine, gpu=rates, memory_bytes_per_s=rates.memory_bytes_per_s
        )
        plan = replace(session.decision.plan, machine=machine)
        found = []
        for each in rows:
            found.append(measured(session.target, each, repeats))
            show(found[-1], pass_time(plan, each), plan.target, rates)
        checks = points(plan, found)
        if session.decision.draft is not None:
            steps = iterations(session, count)
            checks += iteration_points(plan, session.decision.draft.sizes, steps)
    beside = Check("layers", True, f"{plan.label}, {sum(plan.target.layers) / 1e9:.2f} GB")
    copies = Check("memory", True, f"{rates.memory_bytes_per_s / 1e9:.0f} GB/s, {rates.card}")
    return [beside, copies, *checks]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rig", type=Path, help="a checkpoint with packed weights")
    parser.add_argument("--rows", default=",".join(map(str, PROBED_ROWS)), metavar="N,...")
    parser.add_argument("--draft", default="demo-draft",
                        help="with the rig's tokenizer, or none; default: %(default)s")  # fmt: skip
    args = parser.parse_args(argv)
    rates = probe_gpu(DEVICE)
    print(json.dumps({"rates": asdict(rates)}), flush=True)
    rows, draft = [int(count) for count in args.rows.split(",")], args.draft
    checks = passes_step(args.rig, rows, rates, draft=None if draft == "none" else draft)
    print("\n" + "\n".join(check.line for check in checks))
    print(json.dumps(report(checks)))
    return 0


def report(checks: Sequence[Check]) -> dict[str, Any]:
    """The last line, as first_gpu_report reads it."""
    return {"checks": [asdict(check) for check in checks]}


if __name__ == "__main__":
    sys.exit(main())
