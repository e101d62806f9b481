"""Experts one by one beside whole layers: tokens per second of a mixture in the same memory.

    python scripts/make_rig.py --shape qwen3-30b-a3b --layers 12 --bits 4 --skew 0.27 --out RIG
    python scripts/make_rig.py --shape qwen3-30b-a3b --layers 8 --bits 4 --skew 0.33 --out RIG
    python scripts/make_rig.py --shape mixtral-8x7b --layers 8 --bits 4 --out RIG
    python scripts/make_rig.py --shape gpt-oss-20b --format gpt-oss --out RIG
    python scripts/bench_experts.py --rig RIG --share 0.25 --before CHECKOUT

The memory is set so that the planner gives the cache of experts `--share` of their bytes. Moving
whole layers, in this version and in the one in CHECKOUT, gets the same memory, or the least that it
runs with. A CHECKOUT that can move experts one by one does that instead. All must generate the same
text. The rate of reads in passes is compared with bare reads of the same size at random places of
the same files: in bursts as long as a layer's, and without a pause. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from offload_report import environment

from specexec_cli.device import format_bytes
from specexec_cli.errors import ConfigError, OutOfMemoryError, SpecexecError
from specexec_cli.loading import this_site
from specexec_cli.models.experts import split_layers
from specexec_cli.models.packing import read_packing
from specexec_cli.models.skeleton import build_skeleton
from specexec_cli.offload.experts import READER_THREADS
from specexec_cli.offload.memory import HugeBuffer
from specexec_cli.offload.reader import BLOCK_BYTES, DirectFile, Layout, lay_out
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.machine import Setting
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import Decision, resolve

DEMO = Path(__file__).parents[1] / "specexec_cli" / "demo"
WORKER = Path(__file__).with_name("expert_worker.py")
METHODS = ("autoregressive", "specexec")
RAW_S = 2.0  # of bare reads
WITHOUT_PAUSE = 256  # reads of a burst so long that its ends do not count


def decision_for(rig: Path, draft: Path, share: float) -> Decision:
    """The Decision with the least memory that gives the experts' cache this share of their bytes.

    Raises:
        ConfigError: the rig is no mixture.
    """
    request = Request(model=str(rig), draft=str(draft))
    site = replace(this_site(torch.device("cpu")), measure=None)
    low, high, found = 0, 1 << 38, None
    while high - low > 1 << 20:
        ram = (low + high) // 2
        settings = {**site.settings, "ram": Setting(ram, "given")}
        try:
            found = resolve(request, replace(site, settings=settings))
            experts = found.target.sizes.experts
            if experts is None:
                raise ConfigError(f"{rig} is no mixture: a share of experts needs one")
            enough = not found.plan.expert_bytes or (
                found.plan.expert_bytes >= share * sum(experts.layers)
            )
        except OutOfMemoryError:
            enough = False
        low, high = (low, ram) if enough else (ram, high)
    settings = {**site.settings, "ram": Setting(high, "given")}
    return resolve(request, replace(site, settings=settings))


def expert_layouts(rig: Path) -> list[Layout]:
    """Where each expert of a checkpoint lies."""
    checkpoint = read_checkpoint(rig)
    quantization = read_packing(checkpoint, print)
    skeleton = build_skeleton(checkpoint, quantization)
    return [
        lay_out(list(expert.values()))
        for layer in split_layers(skeleton)
        for expert in layer.experts
    ]


def raw_rate(paths: Sequence[Path], n_bytes: int, burst: int, seed: int) -> float:
    """Bytes per second of bare reads at random places, as many at once as the store has readers.

    Args:
        paths: the files to read.
        n_bytes: bytes of a read, a multiple of BLOCK_BYTES.
        burst: reads of a burst; the next burst begins when all of them are done.
        seed: of the random places.
    """
    rng = random.Random(seed)
    files = [DirectFile(path, print) for path in paths]
    rooms = [max(0, file.n_bytes - n_bytes) // BLOCK_BYTES + 1 for file in files]
    free: SimpleQueue[HugeBuffer] = SimpleQueue()
    for _ in range(READER_THREADS):
        free.put(HugeBuffer(n_bytes, "a raw read", "Close other programs"))

    def read(place: tuple[DirectFile, int]) -> int:
        file, start = place
        buffer = free.get()
        count = file.read_into(buffer.view, start, start + n_bytes)
        free.put(buffer)
        return count

    def places() -> list[tuple[DirectFile, int]]:
        chosen = rng.choices(range(len(files)), rooms, k=burst)
        found = ((index, rng.randrange(rooms[index])) for index in chosen)
        return [(files[index], block * BLOCK_BYTES) for index, block in sorted(found)]

    total, started = 0, time.perf_counter()
    with ThreadPoolExecutor(READER_THREADS) as readers:
        while time.perf_counter() < started + RAW_S:
            total += sum(readers.map(read, places()))
    rate = total / (time.perf_counter() - started)
    for file in files:
        file.close()
    while not free.empty():
        free.get().close()
    return rate


def measure(task: dict[str, Any], checkout: Path | None) -> dict[str, Any]:
    """Runs expert_worker.py over this version, or over an earlier one's checkout."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.json"
        path.write_text(json.dumps(task))
        # nothing learned earlier; threads wait for one another as those of `specexec` do
        env = {"GOMP_SPINCOUNT": "10000", **os.environ, "XDG_CACHE_HOME": folder}
        if checkout is not None:
            env["PYTHONPATH"] = os.pathsep.join(map(str, (checkout, checkout / "kernels")))
        ran = subprocess.run(
            [sys.executable, WORKER, path], env=env, stdout=subprocess.PIPE, text=True, check=True
        )
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def show(name: str, found: dict[str, Any], base: dict[str, float]) -> None:
    """One line for each method."""
    for method, row in found["methods"].items():
        rate = row["tokens"] / row["seconds"]
        line = (
            f"{name:14} {method:15} {rate:7.2f} tok/s {row['tokens'] / row['passes']:5.2f} tok/pass"
        )
        line += f" {format_bytes(row['bytes'] / row['tokens']):>9}/token"
        if method in base:
            line += f" {rate / base[method]:6.2f}x"
        if row.get("touched"):
            line += f"  {row['touched'] / row['tokens']:.0f} experts/token, "
            line += f"{row['hits'] / row['touched']:.1%} held"
        print(line, flush=True)


def shares(row: dict[str, float], layouts: list[Layout], layers: int) -> dict[str, float]:
    """Compares the reads of a run with what was needed, and with the disk's rate.

    Returns:
        bytes read / bytes that were needed and not held; the rate and mean size of the reads; the
        rates of bare reads of that size; and shares of the time. No rates if nothing was read.
    """
    missed, visits = row["touched"] - row["hits"], row["passes"] * layers
    needed = missed * float(np.mean([layout.tensor_bytes for layout in layouts]))
    found = {
        "missed_by_a_visit": missed / visits,
        "reads_of_a_visit": row["reads"] / visits,
        "read_of_needed": row["bytes_read"] / needed if needed else 1.0,
        "reading_share": row["reading_s"] / row["seconds"],
        "waiting_share": row["wait_s"] / row["seconds"],
    }
    if not row["reads"]:
        return found
    size = -(-round(row["bytes_read"] / row["reads"]) // BLOCK_BYTES) * BLOCK_BYTES
    paths = sorted({extent.path for layout in layouts for extent in layout.extents})
    rate = row["bytes_read"] / row["reading_s"]
    found |= {"read_bytes": size, "bytes_per_s": rate}
    bursts = {"burst": max(1, round(row["reads"] / visits)), "raw": WITHOUT_PAUSE}
    for name, burst in bursts.items():
        raw = float(np.mean([raw_rate(paths, size, burst, seed) for seed in (0, 1)]))
        found |= {f"{name}_bytes_per_s": raw, f"rate_of_{name}": rate / raw}
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rig", type=Path, required=True, metavar="FOLDER", help="of make_rig.py")
    parser.add_argument("--draft", type=Path, default=DEMO / "draft", metavar="FOLDER")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts' bytes")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="of an earlier version")
    parser.add_argument("--without-whole", action="store_true", help="none moved by this version")
    parser.add_argument("--tokens", type=int, default=64, help="of each text with experts")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--budget", type=int, default=64, help="of the draft tree")
    return parser.parse_args(argv)


def measured(
    args: argparse.Namespace, decision: Decision
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Runs everything that was asked for, this version's experts last.

    Returns:
        the result of each run, and by method the best rate of the runs that move whole layers.
    """
    prompts = [item["prompt"] for item in json.loads((DEMO / "heldout_prompts.json").read_text())
               if item["kind"] == "code"]  # fmt: skip
    task = {
        "rig": str(args.rig), "draft": str(args.draft), "dtype": "auto",
        "ram_bytes": int(decision.settings["ram"].value), "whole_layers": False,
        "tree": {"budget": args.budget, "max_depth": min(16, args.budget),
                 "batch": min(8, args.budget)},
        "methods": METHODS, "prompts": prompts[: args.texts + 1], "warm_tokens": args.tokens // 2,
        "tokens": dict.fromkeys(METHODS, args.tokens),
    }  # fmt: skip
    # every pass of whole layers costs the same, so a few prompts are enough
    few = {"warm_tokens": 2, "tokens": {"autoregressive": 5, "specexec": 16},
           "prompts": prompts[:2]}  # fmt: skip
    runs: dict[str, tuple[dict[str, Any], Path | None]] = {}
    if not args.without_whole:
        runs["whole layers"] = {**task, **few, "whole_layers": True}, None
    if args.before is not None:
        has_experts = (args.before / "specexec_cli" / "offload" / "experts.py").is_file()
        runs["before"] = task if has_experts else {**task, **few}, args.before
    runs["experts"] = task, None
    found: dict[str, dict[str, Any]] = {}
    base: dict[str, float] = {}
    for name, run in runs.items():
        found[name] = measure(*run)
        show(name, found[name], base if name == "experts" else {})
        for method, row in found[name]["methods"].items():
            if name != "experts":
                base[method] = max(base.get(method, 0.0), row["tokens"] / row["seconds"])
    return found, base


def different_texts(found: dict[str, dict[str, Any]]) -> list[str]:
    """The runs and methods with another text than this version's with single experts."""
    return [
        f"{name}, {method}"
        for name, result in found.items()
        for method, texts in result["texts"].items()
        for ours, theirs in zip(found["experts"]["texts"][method], texts, strict=False)
        if any(one != other for one, other in zip(ours, theirs, strict=False))
    ]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints the tables, and returns the object of the last line."""
    decision = decision_for(args.rig, args.draft, args.share)
    experts = decision.target.sizes.experts
    assert experts is not None
    if not decision.plan.expert_bytes:
        raise ConfigError(
            f"{args.rig} fits into the memory in which its experts get {args.share:.0%} of their "
            "bytes, so that whole layers stay: lower --share, or make a larger rig"
        )
    sizes = decision.settings["ram"].value, decision.plan.expert_bytes, sum(experts.layers)
    ram, cache, stored = map(format_bytes, sizes)
    print(f"{ram} of RAM, {cache} for experts of {stored}")
    found, base = measured(args, decision)
    different = different_texts(found)
    for which in different:
        print(f"{which}: another text", file=sys.stderr)
    layouts = expert_layouts(args.rig)
    layers = sum(size > 0 for size in experts.layers)
    reads = {
        method: shares(row, layouts, layers) for method, row in found["experts"]["methods"].items()
    }
    for method, row in reads.items():
        print(method, {name: round(value, 3) for name, value in row.items()})
    return {
        **environment(args.rig, 0), "bench": "experts", "share": args.share,
        "expert_bytes": decision.plan.expert_bytes, "reads": reads, "base": base, "found": found,
        "different": different,
    }  # fmt: skip


def main() -> int:
    try:
        report = run(parse())
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(report))
    return 1 if report["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
