"""What scripts/first_gpu runs, how long each step may take, and what passes: the Reach lines."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from first_gpu_report import (
    EXIT_STATUS,
    Check,
    Claim,
    Judge,
    Step,
    exit_status,
    last_json,
    own_checks,
)

HERE = Path(__file__).parent
CAPS_GB = (8, 12, 24)
# The Reach lines: shares of what this machine's bare links and memory do in the same run.
RAM_SHARE = 0.95  # of bare copies from pinned memory, by layers streamed from RAM
SSD_SHARE = 0.90  # of bare reads, by layers streamed from the SSD
PASS_RATIO = 1.10  # seconds of a pass over max(bytes / bare rate, arithmetic alone)
DEQUANTIZE_SHARE = 0.80  # of the memory's rate, by whole weights unpacked
FEW_ROWS_SHARE = 0.60  # of the memory's rate, by products of up to 16 rows with packed weights
KERNEL_TESTS = (
    "compact_kv", "gumbel", "log_softmax_topk", "pinned", "tree_attention", "triton_experts",
    "triton_recurrence", "triton_rows",
)  # fmt: skip
RIG_LAYERS, RIG_LAYER_BYTES = 20, 430_000_000  # of Llama-2-70B in 4 bits
_STREAMS = {f"offload-{tiers}": ("stream over the bare rate",) for tiers in ("ram", "ssd", "tiers")}
_RESERVED = {f"memory-{cap}": ("reserved", "with the context") for cap in CAPS_GB}
_TESTS = {"tests": ("pytest",)}
# Lines of docs/gpu.md, in its order, with the steps and their checks that prove them.
CLAIMS = (
    Claim("Every product has the bits that it has as it is stored.", _TESTS),
    Claim("A thread of its own copies layers", _STREAMS),
    Claim("Memory is pinned as far as the driver grants it.", {"environment": ("pinned",)}),
    Claim("The plan counts the drafter's rows of the vocabulary, caches as large as they get, "
          "one block of rows, the CUDA context, and the slabs of RAM.", _RESERVED),
    Claim("are replayed as CUDA graphs",
          {**_TESTS, "growth": ("text",), "interrupt-capture": ("text",)}),
    Claim("On a GPU with the Triton kernels that holds too", {**_TESTS, "self-draft": ("plain",)}),
    Claim("pass = max(SSD, link, computing)", {"passes": ("rows, pass",)}),
    Claim("GPU = packed bytes read / memory + unpacking + products of the tiles",
          {"passes": ("GPU busy",)}),
    Claim("host = operations and kernels that are started", {"passes": ("rows, host",)}),
    Claim("iteration = pass + drafting", {"passes": ("nodes, iteration", "nodes, drafting")}),
    Claim("129 rows of packed weights are a tile of 128 and one of 16",
          {"passes": ("129 rows over",)}),
    Claim("What is started and waited for is counted on the stand-in",
          {"passes": ("kernels started", "waits")}),
)  # fmt: skip


def steps(work: Path, layers: int) -> list[Step]:
    """Everything, in the order of what later steps rest on.

    Args:
        work: a folder for the rig; it is written where it is not there.
        layers: of the rig.
    """
    python, rig = sys.executable, work / f"rig-70b-4bit-{layers}"
    kernels = [str(HERE.parent / "tests" / "kernels" / f"test_{name}.py") for name in KERNEL_TESTS]

    def own(name: str, title: str, limit_s: float, *arguments: str) -> Step:
        command = (python, str(HERE / "first_gpu_steps.py"), name, *arguments)
        return Step(name="-".join([name, *arguments[:1]]), title=title, command=command,
                    limit_s=limit_s, judge=own_checks)  # fmt: skip

    def on_rig(name: str, title: str, judge: Judge, *command: str) -> Step:
        return Step(name=name, title=title, command=command, limit_s=180, judge=judge,
                    obstacle=lambda: _no_rig(rig))  # fmt: skip

    def offload(name: str, title: str, share: float, *options: str) -> Step:
        script = str(HERE / "bench_offload.py")
        return on_rig(
            name, title, lambda status, output: offload_checks(status, output, share),
            python, script, "--rig", str(rig), "--device", "cuda", "--quick", *options,
        )  # fmt: skip

    return [
        own("environment", "Environment", 60),
        Step(name="doctor", title="specexec doctor", limit_s=180, judge=doctor_checks,
             command=(python, "-c", "from specexec_cli.cli.main import main; main()", "doctor",
                      "--json")),
        Step(name="tests", title="Tests on the GPU", limit_s=420, judge=pytest_checks,
             command=(python, "-m", "pytest", "-q", "-m", "gpu", str(HERE.parent / "tests"))),
        Step(name="sanitizer", title="compute-sanitizer over the kernels' tests", limit_s=300,
             judge=sanitizer_checks, obstacle=_no_sanitizer,
             environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
             command=("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", python,
                      "-m", "pytest", "-q", "-x", "-m", "gpu", *kernels)),
        Step(name="kernels", title="Kernels against the memory's rate", limit_s=180,
             judge=kernel_checks,
             command=(python, str(HERE / "bench_kernels.py"), "--device", "cuda", "--repeats", "3",
                      "--rows", "1,16,64,256", "--bits", "4")),
        own("text", "Text of a GPTQ act-order session in float16", 120),
        own("growth", "Growth past 2048 slots", 120),
        own("trees", "Trees of 1024 nodes", 120),
        own("self-draft", "Drafting with the target's own copy", 120),
        own("interrupt", "Ctrl-C in a copy", 120, "copy"),
        own("interrupt", "Ctrl-C in a capture", 120, "capture"),
        Step(name="rig", title="A rig of a 70B model's layers in 4 bits", limit_s=240,
             judge=exit_status, obstacle=lambda: _no_room(rig, layers),
             command=(python, str(HERE / "make_rig.py"), "--shape", "llama2-70b", "--bits", "4",
                      "--layers", str(layers), "--out", str(rig))),
        on_rig("passes", "Passes of the rig beside the plan, part by part", own_checks, python,
               str(HERE / "first_gpu_passes.py"), str(rig)),
        offload("offload-ram", "Layers from RAM", RAM_SHARE, "--tier", "ram"),
        offload("offload-ssd", "Layers from the SSD", SSD_SHARE, "--tier", "ssd"),
        offload("offload-tiers", "Layers from VRAM, RAM and the SSD", SSD_SHARE, "--tier", "ssd",
                "--keep", "thirds"),
        *(
            on_rig(f"memory-{cap}", f"Memory against the plan, {cap} GB", own_checks, python,
                   str(HERE / "first_gpu_steps.py"), "memory", str(cap), str(rig))
            for cap in CAPS_GB
        ),
    ]  # fmt: skip


def rig_layers(free_ram_bytes: int, free_disk_bytes: int) -> int:
    """Layers of a rig that a third of the RAM and most of the disk hold."""
    room = min(free_ram_bytes // 3, free_disk_bytes * 9 // 10)
    return max(3, min(RIG_LAYERS, room // RIG_LAYER_BYTES))


def _no_sanitizer() -> str | None:
    if shutil.which("compute-sanitizer"):
        return None
    return "compute-sanitizer is not on the PATH: it comes with the CUDA toolkit"


def _no_room(rig: Path, layers: int) -> str | None:
    if rig.is_dir():
        return f"{rig} is there already, and is used"
    needed = layers * RIG_LAYER_BYTES
    rig.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(rig.parent).free
    if needed > free:
        return (
            f"{rig.parent} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed: "
            "give another folder with --work"
        )
    return None


def _no_rig(rig: Path) -> str | None:
    return None if rig.is_dir() else "the rig was not written, see its step"


def doctor_checks(status: int, output: str) -> list[Check]:
    """That the GPU's kernels start, and the rates that plans rest on."""
    found = last_json(output)
    rates = found["rates"]
    seen = bool(found["torch_sees_gpu"])
    obstacle = found["triton_obstacle"]
    return [
        *exit_status(status, output),
        Check("torch sees the GPU", seen, str(seen), "True"),
        Check("Triton starts", obstacle is None, obstacle or "it does", "it does"),
        Check("the link", True, f"{(rates['link_bytes_per_s'] or 0) / 1e9:.1f} GB/s"),
        Check("the SSD", True, f"{(rates['ssd_bytes_per_s'] or 0) / 1e9:.1f} GB/s"),
    ]


def pytest_checks(status: int, output: str) -> list[Check]:
    """That some of pytest's tests ran, and none failed; what it says of them is its last line."""
    last = output.strip().splitlines()[-1]
    if status not in (0, 1):  # it broke off, or there was no test
        return [Check(EXIT_STATUS, False, f"{status}, {last}", "0")]
    passed = re.search(r"(\d+) passed", last)
    found = last.strip("= ")
    return [Check("pytest", status == 0 and passed is not None, found, "all that ran passed")]


def sanitizer_checks(status: int, output: str) -> list[Check]:
    """That compute-sanitizer watched, and saw nothing."""
    counted = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    errors = sum(map(int, counted))
    found = f"{errors} errors, exit status {status}" if counted else "it printed no summary"
    return [Check("memcheck", bool(counted) and not errors and not status, found, "0 errors")]


def kernel_checks(status: int, output: str) -> list[Check]:
    """Shares of the floor, which is the larger of bytes / memory rate and FLOPs / GEMM rate."""
    checks = exit_status(status, output)
    for case in last_json(output)["results"]:
        for name, row in case["implementations"].items():
            wanted = _wanted_share(case, name)
            if wanted is not None:
                share = row["of_floor"]
                checks.append(Check(f"{case['case']}, {name}", share >= wanted,
                                    f"{share:.0%} of the floor", f"{wanted:.0%}"))  # fmt: skip
    if len(checks) < 4:
        raise ValueError("kernels are missing in it")
    return checks


def _wanted_share(case: dict[str, Any], name: str) -> float | None:
    """What is asked of an implementation; None where it is only compared with."""
    if case["case"] == "dequantize" and name == "Triton":
        return DEQUANTIZE_SHARE
    if case["case"].startswith("linear") and name == "fused" and case["rows"] <= 16:
        return FEW_ROWS_SHARE
    return None


def offload_checks(status: int, output: str, share: float) -> list[Check]:
    """A run of bench_offload: the stream against bare copies or reads, passes, and the text.

    Args:
        share: of the bare rate that the stream is to reach.
    """
    report = last_json(output)
    reached = 1.0 / report["stream"]["ratio"]["p50"]
    same = report["same_tokens"]
    worst = max(report["passes"], key=lambda row: row["ratio"]["p50"])
    ratio = worst["ratio"]["p50"]
    return [
        *exit_status(status, output),
        Check("stream over the bare rate", reached >= share,
              f"{reached:.2f} of {report['raw']['bytes_per_s']['p50'] / 1e9:.1f} GB/s",
              f"{share:.2f}"),
        Check(f"a pass of {worst['rows']} rows over its floor", ratio <= PASS_RATIO,
              f"{ratio:.2f}", f"at most {PASS_RATIO:.2f}"),
        Check("text with drafting", bool(same), "the same" if same else "another", "the same"),
        Check("tokens per second", True, _speeds(report)),
    ]  # fmt: skip


def _speeds(report: dict[str, Any]) -> str:
    plain, tree = (report["decode"][name] for name in ("autoregressive", "specexec"))
    return (f"{plain['tokens_per_s']:.2f}, with drafting {tree['tokens_per_s']:.2f}, "
            f"{tree['tau']:.1f} an iteration of {tree['over_pass']['p50']:.2f} passes")  # fmt: skip


def only(found: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """The steps of these names.

    Raises:
        ValueError: there is none of a name.
    """
    known = [step.name for step in found]
    for name in names:
        if name not in known:
            raise ValueError(f"--only {name}: the steps are {', '.join(known)}")
    return [step for step in found if step.name in names]
