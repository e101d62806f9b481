"""Examines a machine for `specexec doctor`, and says which of its parts will be slow."""

from __future__ import annotations

import os
import platform
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from specexec_cli import __version__
from specexec_cli.cli.mends import with_mend
from specexec_cli.device import (
    CpuInfo,
    GpuInfo,
    cpu_info,
    format_bytes,
    free_ram_bytes,
    gpus,
    huge_pages,
    physical_ram_bytes,
    total_ram_bytes,
)
from specexec_cli.errors import SpecexecError
from specexec_cli.planning.dtype_choice import multiplies_bytes
from specexec_cli.planning.machine_rates import (
    PACKED_BITS,
    FlopsByRows,
    GpuRates,
    LayerCost,
    Rates,
    arithmetic_name,
    most_rows,
    new_rates,
    product_seconds,
)
from specexec_cli.quiet import QuietCheck
from specexec_cli.triton_check import without_triton

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub", "llvmlite")
SLOW_DISK_BYTES_PER_S = 1e9
LITTLE_DISK_BYTES = 20_000_000_000
HUB_TIMEOUT_S = 4.0
# a 7B model in 16-bit weights, for which advice is given
_7B_BYTES, _7B_WEIGHTS = 13_000_000_000, 6_476_000_000

# groups of rates that are measured together
_DISK, _PRODUCTS, _MEMORY, _LINK = "the disk", "arithmetic", "memory", "the link to the GPU"
_GPU = "the GPU"

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found about one machine."""

    versions: dict[str, str]
    platform: str
    cpu: CpuInfo
    load: float  # processes ready to run, average of the last minute
    ram_bytes: int  # most RAM that this process may use
    physical_ram_bytes: int
    free_ram_bytes: int
    huge_pages: str
    gpus: tuple[GpuInfo, ...]
    torch_sees_gpu: bool
    cache: str  # folder of downloaded models
    disk_free_bytes: int
    direct_reads: bool | None  # whether O_DIRECT works; None if the disk could not be measured
    disk_error: str
    hub: str  # the hub's address
    hub_error: str  # empty if the hub is reachable
    rates: Rates
    # group of rates that other programs disturbed -> what those programs used
    disturbed: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)  # operation -> the kernel that runs it
    triton_obstacle: str | None = None  # why Triton's kernels do not run on the GPU

    @property
    def kept_rates(self) -> Rates:
        """The rates, without those that other programs disturbed."""
        none: dict[str, Any] = {}
        for name in self.disturbed:
            none |= dict.fromkeys(_RATES_OF[name])
        return replace(self.rates, **none)


# group of rates -> fields of Rates
_RATES_OF = {
    _DISK: ("ssd_bytes_per_s",),
    _PRODUCTS: ("flops",),
    _MEMORY: ("memory_bytes_per_s", "layers"),
    _LINK: ("link_bytes_per_s",),
    _GPU: ("gpu",),
}


def examine(step: Step) -> Report:
    """Examines the machine and measures its rates; `step` is told what is measured next."""
    from huggingface_hub import constants

    checks: dict[str, QuietCheck] = {}
    step(_DISK)
    cache = Path(constants.HF_HUB_CACHE)
    checks[_DISK] = QuietCheck(_existing(cache))
    disk_rate, direct, disk_error = _measure_disk(_existing(cache), checks[_DISK])
    step(f"{_MEMORY} and {_PRODUCTS}")
    checks[_PRODUCTS], checks[_MEMORY] = QuietCheck(computes=True), QuietCheck()
    memory, flops, layers = _measure_cpu(checks[_PRODUCTS], checks[_MEMORY])
    checks[_LINK] = QuietCheck()
    link, sees_gpu = _measure_link(checks[_LINK])
    gpu = None
    if sees_gpu:
        step(_GPU)
        checks[_GPU] = QuietCheck()
        gpu = _measure_gpu(checks[_GPU])
    step("the hub")
    hub_error = "offline mode is set" if constants.is_offline_mode() else ask(constants.ENDPOINT)
    return Report(
        versions={"specexec": __version__, "Python": platform.python_version(),
                  **{name: _version(name) for name in PACKAGES}},
        platform=platform.platform(),
        cpu=cpu_info(),
        load=os.getloadavg()[0],
        ram_bytes=total_ram_bytes(),
        physical_ram_bytes=physical_ram_bytes(),
        free_ram_bytes=free_ram_bytes(),
        huge_pages=huge_pages(),
        gpus=tuple(gpus()),
        torch_sees_gpu=sees_gpu,
        cache=str(cache),
        disk_free_bytes=shutil.disk_usage(_existing(cache)).free,
        direct_reads=direct,
        disk_error=disk_error,
        hub=constants.ENDPOINT,
        hub_error=hub_error,
        rates=replace(
            new_rates(), ssd_bytes_per_s=disk_rate, memory_bytes_per_s=memory,
            link_bytes_per_s=link, flops=flops, layers=layers, gpu=gpu,
        ),
        disturbed={
            name: check.disturbance for name, check in checks.items() if check.disturbance
        },
        **_kernels(sees_gpu),
    )  # fmt: skip


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _kernels(gpu: bool) -> dict[str, Any]:
    import torch
    from specexec_kernels.dispatch import choices, triton_obstacle

    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    return {
        "kernels": choices(device),
        "triton_obstacle": triton_obstacle(device) if gpu else None,
    }


def _measure_disk(folder: Path, check: QuietCheck) -> tuple[float | None, bool | None, str]:
    """Read rate in bytes per second, whether O_DIRECT works, and the error if measuring failed."""
    from specexec_cli.offload.disk_probe import probe_folder

    try:
        with check:
            found = probe_folder(folder)
    except SpecexecError as error:  # a full or read-only disk must not end the examination
        return None, None, with_mend(error)
    check.own_bytes = found.n_bytes
    return found.bytes_per_s, found.direct, ""


def _measure_cpu(
    products: QuietCheck, others: QuietCheck
) -> tuple[float, dict[str, FlopsByRows], dict[str, LayerCost]]:
    """Memory rate, FLOP/s of products by arithmetic, and cost of a layer's rest by dtype."""
    from specexec_cli.models import arithmetic_probe

    with products:
        flops = {
            arithmetic_name(name, bits): arithmetic_probe.probe_arithmetic(name, bits)
            for name in ("float32", "bfloat16")
            for bits in (0, *PACKED_BITS)
        }
        for bits in PACKED_BITS if multiplies_bytes() else ():
            name = arithmetic_name("float32", bits, eight_bit_rows=True)
            flops[name] = arithmetic_probe.probe_arithmetic("float32", bits, True)
    with others:
        layers = {name: arithmetic_probe.probe_layer(name) for name in ("float32", "bfloat16")}
        return arithmetic_probe.probe_memory(), flops, layers


def _measure_link(check: QuietCheck) -> tuple[float | None, bool]:
    """Rate from RAM to the GPU in bytes per second, and whether there is a GPU."""
    import torch

    from specexec_cli.loading import sees_cuda
    from specexec_cli.offload.link_probe import probe_link

    if not sees_cuda():
        return None, False
    with check:
        return probe_link(torch.device("cuda", 0)), True


def _measure_gpu(check: QuietCheck) -> GpuRates:
    """What the first GPU does, by its own clock and the host's."""
    import torch

    from specexec_cli.models.gpu_probe import probe_gpu

    with check:
        return probe_gpu(torch.device("cuda", 0))


def ask(address: str) -> str:
    """Why the address does not answer; empty if it answers."""
    request = urllib.request.Request(address, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        status = error.code
        error.close()
        return "" if status < 500 and status not in (403, 407) else f"it answered {status}"
    except urllib.error.URLError as error:
        return str(getattr(error.reason, "strerror", None) or error.reason)
    except OSError as error:
        return str(error.strerror or error)


def slow_parts(report: Report) -> list[str]:
    """The slow parts of this machine: one sentence each, with the reason and what would help."""
    return [*_slow_compute(report), *_slow_memory(report), *_slow_disk(report)]


def _slow_compute(report: Report) -> list[str]:
    found = []
    torch = report.versions["torch"]
    if report.gpus and not report.torch_sees_gpu:
        found.append(
            f"torch {torch} cannot use the GPU: install a CUDA build of torch, and a driver new "
            f"enough for it (CUDA 13: R580; here: {report.gpus[0].driver})."
        )
    elif not report.gpus:
        found.append("There is no GPU, so the CPU computes.")
    for gpu in report.gpus:
        if gpu.pcie_width and gpu.pcie_width < 16:
            found.append(
                f"GPU {gpu.index} has {gpu.pcie_width} of 16 PCIe lanes: layers stream to it at "
                "that share of the rate."
            )
    if report.triton_obstacle:
        found.append(without_triton(report.triton_obstacle))
    if report.disturbed:
        told = ", ".join(
            f"{what} while {name} was measured" for name, what in report.disturbed.items()
        )
        found.append(
            f"The machine is busy: {told}. These figures are less than it can do and are not kept; "
            "those of a quieter time stay."
        )
    flops = report.rates.flops or {}
    best = {name: max((rate for _, rate in points), default=0.0) for name, points in flops.items()}
    if not report.torch_sees_gpu and 0 < best.get("bfloat16", 0.0) < best.get("float32", 0.0):
        found.append(
            f"bfloat16 arithmetic is slower than float32 ({best['bfloat16'] / 1e9:.0f} against "
            f"{best['float32'] / 1e9:.0f} GFLOP/s): caches and activations take twice the memory."
        )
    ssd = report.rates.ssd_bytes_per_s
    stored = [flops[name] for name in ("float32", "bfloat16") if name in flops]
    points = max(stored, key=lambda item: max(rate for _, rate in item), default=())
    if not report.torch_sees_gpu and ssd and points:
        knee = most_rows(lambda rows: product_seconds(_7B_WEIGHTS, rows, points), _7B_BYTES / ssd)
        found.append(
            f"Arithmetic of up to {knee} rows hides behind reading a 7B model from this disk; "
            "larger draft trees cost time."
            if knee
            else "Arithmetic is slower than this disk: a pass waits for it even with one row."
        )
    return found


def _slow_memory(report: Report) -> list[str]:
    found = []
    if report.ram_bytes < 0.95 * report.physical_ram_bytes:
        found.append(
            f"This process may use {format_bytes(report.ram_bytes)} of the machine's "
            f"{format_bytes(report.physical_ram_bytes)} (a cgroup or ulimit)."
        )
    if report.huge_pages == "never":
        found.append(
            "Huge pages are off, so the disk is read in small requests: write madvise to "
            "/sys/kernel/mm/transparent_hugepage/enabled."
        )
    return found


def _slow_disk(report: Report) -> list[str]:
    found = []
    ssd = report.rates.ssd_bytes_per_s
    if report.disk_error:
        found.append(f"The disk could not be measured: {report.disk_error}.")
    if ssd and ssd < SLOW_DISK_BYTES_PER_S:
        found.append(
            f"The disk reads {format_bytes(ssd)}/s, so a pass over a 7B model takes "
            f"{_7B_BYTES / ssd:.0f} s: put the model cache on an NVMe disk (HF_HOME)."
        )
    if report.direct_reads is False:
        found.append(
            f"The file system of {report.cache} refuses O_DIRECT, so reads go through the page "
            "cache: put the model cache on a local disk (HF_HOME)."
        )
    if report.disk_free_bytes < LITTLE_DISK_BYTES:
        found.append(
            f"Only {format_bytes(report.disk_free_bytes)} are free where models are stored: "
            "a 70B model takes 35 GB in 4 bits and 140 GB in 16."
        )
    if report.hub_error:
        found.append(
            f"{report.hub} cannot be reached ({report.hub_error}): only models that are here can "
            "be used."
        )
    return found
