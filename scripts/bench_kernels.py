"""Time the kernels against plain PyTorch and against what the hardware allows.

    python scripts/bench_kernels.py                           # this machine's CPU, or its GPU
    python scripts/bench_kernels.py --passes RIG16 RIG4       # whole passes streamed from the SSD

Implementations take turns, so that a machine that slows down for a while slows all of them down. On
a busy machine use --clock cpu, which measures the processor time of one thread. A ratio is baseline
time / time, so above 1 is faster. The floor is the larger of bytes read / memory rate and FLOPs /
GEMM rate, with both rates measured here. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kernel_cases import (
    Case,
    Run,
    attention_case,
    compact_case,
    cpu_linear,
    dequantize_case,
    gpu_linear,
    narrow_linear,
    random_weight,
    sampling_case,
    topk_case,
)
from quantize_columns import PACKERS

from specexec_cli.lab.bench.environment import environment
from specexec_cli.lab.bench.metrics import quantile
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint

_PIECES, _PIECE_BYTES = 32, 8 << 20  # together larger than the caches
SETTLE_S = 2.0  # seconds in which a ring of three 7B layers becomes full


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How it is measured."""

    device: torch.device
    clock: str  # "wall" or "cpu"
    repeats: int
    rows: tuple[int, ...]
    inputs: int
    outputs: int
    bits: tuple[int, ...]
    formats: tuple[str, ...]  # time only these formats; empty: everything
    seed: int

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.thread_time() if self.clock == "cpu" else time.perf_counter()


def timed(settings: Settings, run: Run) -> float:
    """The seconds of a run; on a GPU the median of many launches, each with a cold cache."""
    if settings.device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=5, rep=50, return_mode="median")) / 1e3
    start = settings.now()
    run()
    return settings.now() - start


def in_turns(settings: Settings, runs: dict[str, Run]) -> dict[str, list[float]]:
    """The seconds of each repeat of each implementation, after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(settings.repeats + 1):
        for name, run in runs.items():
            seconds = timed(settings, run)
            if repeat:
                times[name].append(seconds)
    return times


def machine_rates(settings: Settings) -> tuple[float, float]:
    """The bytes/s of a large sum, and the FLOP/s of a large GEMM in the faster dtype."""
    # on a CPU the sum is taken in pieces, and the fastest one counts, so that other programs do not
    count = _PIECES if settings.device.type == "cpu" else 1
    pieces = torch.zeros(_PIECES * _PIECE_BYTES // 4, device=settings.device).chunk(count)
    turn = itertools.cycle(pieces)
    matrix = torch.randn(2048, 2048, device=settings.device)
    narrow = matrix.bfloat16()
    runs: dict[str, Run] = {
        "gemm": lambda: matrix @ matrix, "bfloat16": lambda: narrow @ narrow,
        **{f"sum {i}": lambda: next(turn).sum() for i in range(count)},
    }  # fmt: skip
    times = in_turns(settings, runs)
    sum_s = min(seconds for name, found in times.items() if "sum" in name for seconds in found)
    gemm_s = min(times["bfloat16"] + (times["gemm"] if settings.device.type == "cpu" else []))
    return pieces[0].nbytes / sum_s, 2 * 2048**3 / gemm_s


def cases(settings: Settings) -> Iterator[Case]:
    """The cases that run on this device."""
    gpu = settings.device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    for rows in () if gpu else settings.rows:
        yield narrow_linear(settings.inputs, settings.outputs, rows, settings.formats or [*PACKERS])
    if settings.formats:
        return
    for bits in settings.bits:
        weight = random_weight(settings.inputs, settings.outputs, bits, settings.device)
        if gpu:
            yield dequantize_case(weight)
        for rows in settings.rows:
            yield gpu_linear(weight, rows) if gpu else cpu_linear(weight, rows)
    if not gpu:
        yield sampling_case(151_936)
    yield attention_case(4096 if gpu else 512, 256 if gpu else 64, settings.device, dtype)
    yield topk_case(16, 32000, 32, settings.device)
    yield compact_case(4096, 16, settings.device, dtype)


def result(
    case: Case, times: dict[str, list[float]], rates: tuple[float, float] | None
) -> dict[str, Any]:
    """Measures one case; the first implementation is the baseline.

    Args:
        rates: memory and GEMM rates; without them there is no floor.
    """

    def floor_s(n_bytes: int) -> float:
        return max(n_bytes / rates[0], case.flops / rates[1]) if rates else 0.0

    baseline = quantile(next(iter(times.values())), 0.5)
    rows = {
        name: {
            "p20_s": quantile(seconds, 0.2), "p50_s": quantile(seconds, 0.5),
            "p80_s": quantile(seconds, 0.8), "ratio": baseline / quantile(seconds, 0.5),
            "of_floor": floor_s(case.wider.get(name, case.n_bytes)) / quantile(seconds, 0.5),
            "samples_s": seconds,
        }
        for name, seconds in times.items()
    }  # fmt: skip
    return {"case": case.name, **case.sizes, "bytes": case.n_bytes,
            "floor_s": floor_s(case.n_bytes), "implementations": rows}  # fmt: skip


def show(found: dict[str, Any]) -> None:
    sizes = ", ".join(f"{k} {v}" for k, v in found.items() if isinstance(v, int))
    print(f"\n{found['case']} ({sizes}), floor {found['floor_s'] * 1e3:.3f} ms")
    print(f"  {'':<28}{'p20 ms':>9}{'p50 ms':>9}{'p80 ms':>9}{'RATIO':>8}{'of floor':>9}")
    for name, row in found["implementations"].items():
        print(f"  {name:<28}{row['p20_s'] * 1e3:9.3f}{row['p50_s'] * 1e3:9.3f}"
              f"{row['p80_s'] * 1e3:9.3f}{row['ratio']:8.2f}{row['of_floor']:9.0%}")  # fmt: skip


def passes(settings: Settings, folders: list[Path]) -> list[dict[str, Any]]:
    """Times whole passes of targets of one shape, streamed from the SSD; the first is the baseline.

    Targets take turns. A target that was just used still fills its ring, which would disturb the
    next one. So each turn waits first, then runs one pass, and times the next two, which begin and
    end with the ring in the same state.
    """
    dtype = torch.float32 if settings.device.type == "cpu" else torch.bfloat16
    models = {
        folder.name: ModelSpec(device=settings.device, dtype=dtype, tiers="ssd").open(
            read_checkpoint(folder)
        )
        for folder in folders
    }
    found = []
    for rows in settings.rows:
        times: dict[str, list[float]] = {name: [] for name in models}
        processor: dict[str, list[float]] = {name: [] for name in models}
        streamed: dict[str, int] = {}
        for _ in range(settings.repeats):
            for name, model in models.items():
                time.sleep(SETTLE_S)
                seconds, processor_s, streamed[name] = _timed_passes(settings, model, rows)
                times[name].append(seconds)
                processor[name].append(processor_s)
        case = Case(name=f"pass of {rows} rows", runs={}, n_bytes=max(streamed.values()),
                    sizes={"rows": rows})  # fmt: skip
        found.append(result(case, times, None) | {"bytes_streamed": streamed,
                                                 "processor_s": processor})  # fmt: skip
        show(found[-1])
        for name, count in streamed.items():
            rate = count / quantile(times[name], 0.5)
            print(f"  {name}: {count / 1e9:.3f} GB per pass, {rate / 1e9:.2f} GB/s, "
                  f"{min(processor[name]):.2f} s of processor time", flush=True)  # fmt: skip
    for model in models.values():
        model.close()
    return found


def _timed_passes(settings: Settings, model: StreamedModel, rows: int) -> tuple[float, float, int]:
    """Seconds, processor seconds and bytes of a pass: the mean of two after an untimed one."""
    assert model.source is not None
    tokens = PassRows.chain(torch.randint(model.vocab_size, (rows,)).tolist(), 0)
    model.forward(tokens, model.new_state(), [rows - 1])
    before, start, processor_s = model.source.bytes_streamed, settings.now(), time.process_time()
    for _ in range(2):
        model.forward(tokens, model.new_state(), [rows - 1])
    elapsed_s, processor_s = settings.now() - start, time.process_time() - processor_s
    return elapsed_s / 2, processor_s / 2, (model.source.bytes_streamed - before) // 2


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", default="1,4,16,32,64,128,256,512", metavar="N,...")
    parser.add_argument("--shape", default="4096x4096", metavar="INPUTSxOUTPUTS")
    parser.add_argument("--bits", default="2,3,4,8", metavar="N,...")
    parser.add_argument("--formats", default="", metavar="NAME,...",
                        help="these formats alone: GGUF's, as in Q4_K, or "
                             f"{', '.join(PACKERS)}")  # fmt: skip
    parser.add_argument("--passes", type=Path, nargs="+", metavar="DIR",
                        help="rigs of one shape: time whole passes instead")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    inputs, _, outputs = args.shape.partition("x")
    settings = Settings(
        device=torch.device(args.device), clock=args.clock, repeats=args.repeats, seed=args.seed,
        rows=tuple(map(int, args.rows.split(","))), inputs=int(inputs), outputs=int(outputs),
        bits=tuple(map(int, args.bits.split(","))),
        formats=tuple(filter(None, args.formats.split(","))),
    )  # fmt: skip
    torch.manual_seed(settings.seed)
    if settings.clock == "cpu":
        torch.set_num_threads(1)
    found, rates = [], None
    if args.passes:
        found = passes(settings, args.passes)
    else:
        rates = machine_rates(settings)
        print(f"memory {rates[0] / 1e9:.1f} GB/s, GEMM {rates[1] / 1e9:.0f} GFLOP/s, "
              f"{torch.get_num_threads()} threads, {settings.clock} clock")  # fmt: skip
        for case in cases(settings):
            found.append(result(case, in_turns(settings, case.runs), rates))
            show(found[-1])
    config = {k: str(v) if isinstance(v, Path | list) else v for k, v in vars(args).items()}
    print(json.dumps({"benchmark": "kernels", "config": config, "results": found,
                      "memory_and_gemm_rates": rates, "environment": environment()}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
