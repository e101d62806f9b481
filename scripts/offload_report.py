"""Turns bench_offload.py's samples into ratios to the floor, a table and a JSON object."""

from __future__ import annotations

import platform
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import specexec_cli
from specexec_cli.core import StepResult
from specexec_cli.device import cpu_info, format_bytes, gpus, total_ram_bytes
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.planning.tiers import Plan

SCHEMA = 1
Spread = dict[str, float]


@dataclass(slots=True)
class Samples:
    """All samples, round after round; a raw rate is that measured just before and after."""

    raw: list[float] = field(default_factory=list)  # bytes per second
    stream: list[tuple[float, float]] = field(default_factory=list)  # (seconds, raw rate)
    passes: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    compute: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    first_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # seconds, raw rate, step
    steps: dict[str, list[tuple[float, float, StepResult]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    texts: dict[str, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))


def spread(values: Iterable[float]) -> Spread:
    """20th, 50th and 80th percentile."""
    p20, p50, p80 = np.percentile(list(values), (20, 50, 80))
    return {"p20": float(p20), "p50": float(p50), "p80": float(p80)}


def environment(rig: Path, seed: int) -> dict[str, Any]:
    """The machine, the models and the settings of this run."""
    cpu = cpu_info()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    config = read_checkpoint(rig).config
    return {
        "schema": SCHEMA,
        "bench": "offload",
        "rig": config.get("speed_rig"),  # None: a real model
        "commit": commit.stdout.strip() or None,
        "hardware": {"cpu": cpu.name, "cores": cpu.cores, "flags": list(cpu.flags),
                     "ram_bytes": total_ram_bytes(), "torch_threads": torch.get_num_threads(),
                     "gpus": [gpu.name for gpu in gpus()]},
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__,
                     "specexec": specexec_cli.__version__, "kernel": platform.release()},
        "seed": seed,
    }  # fmt: skip


def results(samples: Samples, target: ModelBytes, plan: Plan, budget: int) -> dict[str, Any]:
    """Spreads and ratios. A ratio is time over floor: 1 is the limit, more is worse."""
    compute = {rows: float(np.median(times)) for rows, times in samples.compute.items()}
    n_bytes = streamed_bytes(plan)

    def ratio(timed: Iterable[tuple[float, float]], compute_s: float) -> Spread:
        return spread(s / max(n_bytes / rate, compute_s) for s, rate in timed)

    stream_s = spread(s for s, _ in samples.stream)
    passes = [
        {
            "rows": rows,
            "s": spread(s for s, _ in timed),
            "compute_s": spread(samples.compute[rows]),
            "flop_per_s": 2 * target.active_params * rows / compute[rows],
            "ratio": ratio(timed, compute[rows]),
            # rounds take turns through all numbers of rows
            "of_one_row": spread(
                s / one for (s, _), (one, _) in zip(timed, samples.passes[1], strict=False)
            ),
        }
        for rows, timed in sorted(samples.passes.items())
    ]
    decode = {
        method: _decoding(
            samples, method, compute[rows], n_bytes,
            float(np.median([s for s, _ in samples.passes[rows]])),
        )
        for method, rows in (("autoregressive", 1), ("specexec", budget + 1))
    }  # fmt: skip
    plain, tree = decode["autoregressive"], decode["specexec"]
    speedup = tree["tokens_per_s"] / plain["tokens_per_s"]
    return {
        "bytes_per_pass": n_bytes,
        "raw": {"bytes_per_s": spread(samples.raw), "samples": len(samples.raw)},
        "stream": {
            "s": stream_s,
            "bytes_per_s": spread(n_bytes / s for s, _ in samples.stream),
            "ratio": ratio(samples.stream, 0.0),
        },
        "passes": passes,
        "decode": decode,
        "speedup": speedup,
        "speedup_over_tau": speedup / tree["tau"],
        "same_tokens": _same_tokens(samples),
        "knee": {"measured_rows": _knee(compute, stream_s["p50"])},
    }


def streamed_bytes(plan: Plan) -> int:
    """The bytes of a pass over the slowest link in use: the SSD's, or else those to the GPU."""
    return plan.ssd_bytes or plan.link_bytes


def _decoding(
    samples: Samples, method: str, compute_s: float, n_bytes: int, pass_s: float
) -> dict[str, Any]:
    """Figures of a method's iterations, without the first of each text, which runs the prompt."""
    steps = samples.steps[method]
    seconds = sum(s for s, _, _ in steps)
    tokens = sum(len(step.tokens) for _, _, step in steps)
    tau = tokens / len(steps)
    raw = float(np.median([rate for _, rate, _ in steps]))
    roofline = tau * raw / n_bytes if n_bytes else None
    return {
        "iterations": len(steps),
        "s": spread(s for s, _, _ in steps),
        "draft_s": spread(step.draft_s for _, _, step in steps),
        "first_s": spread(samples.first_s[method]),
        "ratio": spread(s / max(n_bytes / rate, compute_s) for s, rate, _ in steps),
        "over_pass": spread(s / pass_s for s, _, _ in steps),
        "tau": tau,
        "tokens_per_s": tokens / seconds,
        "roofline_tokens_per_s": roofline,
        "of_roofline": tokens / seconds / roofline if roofline else None,
    }


def _same_tokens(samples: Samples) -> bool:
    """Whether both methods generated the same tokens, up to the shorter text's end."""
    pairs = zip(samples.texts["autoregressive"], samples.texts["specexec"], strict=True)
    return all(ours[: len(theirs)] == theirs[: len(ours)] for ours, theirs in pairs)


def _knee(compute: Mapping[int, float], stream_s: float) -> float | None:
    """The rows at which arithmetic takes as long as the stream; None if more than measured."""
    rows = sorted(compute)
    times = np.maximum.accumulate([compute[n] for n in rows])
    if not times[0] < stream_s < times[-1]:
        return None
    return float(np.interp(stream_s, times, rows))


def show(report: Mapping[str, Any]) -> None:
    """Prints the table."""
    rig, memory = report["rig"], report["memory"]
    what = f"a speed rig of shape {rig['shape']}" if rig else "a model"
    print(f"{what}, {format_bytes(report['bytes_per_pass'])} streamed per pass, computing in "
          f"{report['config']['compute_dtype']}; {report['hardware']['cpu']}, "
          f"{report['hardware']['cores']} cores, on {report['config']['device']}")  # fmt: skip
    raw, stream = report["raw"]["bytes_per_s"], report["stream"]
    print(f"raw {'copy' if report['config']['tier'] == 'ram' else 'read'}    {_gb(raw)} GB/s")
    print(f"stream only {_gb(stream['bytes_per_s'])} GB/s   {_line(stream)}")
    print("seconds at p20/p50/p80; ratio = seconds / max(bytes / raw rate, arithmetic alone)")
    for row in report["passes"]:
        alone = f"{row['compute_s']['p50']:.3f} s, {row['flop_per_s'] / 1e9:.0f} GFLOP/s"
        times = f"{row['of_one_row']['p50']:.2f} of one row"
        print(f"{row['rows']:5d} rows  {_line(row)}   {times}, arithmetic alone {alone}")
    for method, row in report["decode"].items():
        share = f", {row['of_roofline']:.2f} of the roofline" if row["of_roofline"] else ""
        rates = f"{row['tau']:.2f} tokens each, {row['tokens_per_s']:.3f} tokens/s{share}"
        print(f"{method}: {_line(row)}   {row['over_pass']['p50']:.2f} passes, {rates}")
    print(f"speedup {report['speedup']:.2f} = {report['speedup_over_tau']:.2f} of tokens per pass; "
          f"same tokens: {report['same_tokens']}; knee at {report['knee']['measured_rows']} rows, "
          f"planned {report['knee']['planned_rows']}")  # fmt: skip
    cap = format_bytes(memory["cap_bytes"]) if memory["cap_bytes"] else "no cap"
    print(f"peak RAM {format_bytes(memory['peak_rss_bytes'])}, planned "
          f"{format_bytes(memory['planned_bytes'])} and {format_bytes(memory['bench_bytes'])} for "
          f"arithmetic alone, cap {cap}")  # fmt: skip
    if memory["peak_vram_bytes"]:
        print(f"peak VRAM {format_bytes(memory['peak_vram_bytes'])}, planned "
              f"{format_bytes(memory['planned_vram_bytes'])}")  # fmt: skip


def _gb(values: Spread) -> str:
    return "/".join(f"{value / 1e9:.2f}" for value in values.values())


def _line(row: Mapping[str, Any]) -> str:
    seconds = "/".join(f"{value:.3f}" for value in row["s"].values())
    return f"{seconds} s   ratio {'/'.join(f'{value:.2f}' for value in row['ratio'].values())}"
