"""Facts about the machine, read from the operating system. Knows neither torch nor any model."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

_FIRST_CORE_BYTES = 8192  # of /proc/cpuinfo, at least; flags take 2 kB

# CPU flags that decide which dtype is fast, as in /proc/cpuinfo (x86 "flags", Arm "Features").
FAST_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip
HUGE_PAGE_BYTES = 2 << 20
_NO_LIMIT = 1 << 60  # cgroup v1 writes about 2^63 for "no limit"


@dataclass(frozen=True, slots=True)
class CpuInfo:
    name: str
    cores: int  # usable by this process: affinity and cgroup quota considered
    flags: tuple[str, ...]  # the members of FAST_FLAGS it has


@dataclass(frozen=True, slots=True)
class GpuInfo:
    index: int
    name: str
    total_bytes: int
    free_bytes: int
    pcie_gen: int | None  # the most the link can do; idle GPUs report less
    pcie_width: int | None  # lanes in use
    driver: str


def format_bytes(n_bytes: float) -> str:
    """Decimal units, as disks and links are sold: '35.3 GB', '812 MB'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n_bytes) >= size:
            value = n_bytes / size
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{n_bytes:.0f} B"


_T = TypeVar("_T")
# within looked_at_once(): what was found so far
_SEEN: ContextVar[dict[object, Any] | None] = ContextVar("_SEEN", default=None)


@contextlib.contextmanager
def looked_at_once() -> Iterator[None]:
    """Within the block what does not change between many plans of one machine is looked at once:
    the kernel's files and cores."""
    token = _SEEN.set({})
    try:
        yield
    finally:
        _SEEN.reset(token)


def kernel_file(path: Path, most_bytes: int = -1) -> str:
    """The text of a file that the kernel keeps; empty if this kernel does not offer the file.

    Args:
        most_bytes: the kernel need write no more of it.
    """
    return once((path, most_bytes), lambda: _read(path, most_bytes))


def once(key: object, find: Callable[[], _T]) -> _T:
    """What `find` returns; within looked_at_once() it is called once for each key."""
    seen = _SEEN.get()
    if seen is None:
        return find()
    if key not in seen:
        seen[key] = find()
    found: _T = seen[key]
    return found


def _read(path: Path, most_bytes: int) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            return (file.read(most_bytes) or b"").decode(errors="replace")
    except OSError:
        return ""


def cpu_info() -> CpuInfo:
    """Name, usable cores and the instruction sets that matter for matmuls."""
    text = kernel_file(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    name = model.group(1).strip() if model else (platform.processor() or platform.machine())
    return CpuInfo(name, usable_cores(), cpu_flags())


def cpu_flags() -> tuple[str, ...]:
    """The instruction sets of this CPU that matter for matmuls.

    Without those that SPECEXEC_CPU_WITHOUT turns off for kernels (specexec_kernels.cpu_jit).
    """
    # of all cores the file takes milliseconds
    first_core = kernel_file(Path("/proc/cpuinfo"), _FIRST_CORE_BYTES)
    return _fast_flags(first_core, os.environ.get("SPECEXEC_CPU_WITHOUT", ""))


@lru_cache(maxsize=4)
def _fast_flags(text: str, without: str) -> tuple[str, ...]:
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    off = tuple(filter(None, _bare(without).split(",")))
    have = {flag for flag in (found[1] if found else "").split() if not _bare(flag).startswith(off)}
    return tuple(flag for flag in FAST_FLAGS if flag in have)


def _bare(flags: str) -> str:
    """Flags as Linux and LLVM both write them: avx512_bf16 and amx_bf16 are avx512bf16 and amx-bf16
    to LLVM."""
    return flags.replace("_", "").replace("-", "")


def usable_cores() -> int:
    """Cores this process may run on: CPU affinity, capped by the cgroup's quota."""
    return once("cores", _count_cores)


def _count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for folder in _cgroup_folders("cpu"):
        quota, _, period = kernel_file(folder / "cpu.max").strip().partition(" ")
        if not quota:  # cgroups of version 1
            quota = kernel_file(folder / "cpu.cfs_quota_us").strip()
            period = kernel_file(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def all_cores() -> int:
    """Cores of the machine, whether or not this process may run on them."""
    return os.cpu_count() or 1


def user_seconds() -> float | None:
    """Seconds that all cores together have spent on programs since the machine started.

    They include the time that a host took cores from this virtual machine. They exclude the
    kernel's own time, since the kernel also works for programs that read from a disk. None if the
    system does not tell (macOS).
    """
    found = re.match(r"cpu +(\d+) (\d+)(?: \d+){5} (\d+)", kernel_file(Path("/proc/stat")))
    if found is None:
        return None
    user, nice, steal = (int(ticks) for ticks in found.groups())
    return (user + nice + steal) / os.sysconf("SC_CLK_TCK")


def disk_bytes(folder: Path) -> int | None:
    """Bytes that the disk of a folder has read and written since the machine started.

    None if the system does not tell, or the folder is not on one disk.
    """
    try:
        device = folder.stat().st_dev
    except OSError:
        return None
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if (place / "partition").is_file():
        place = place.resolve().parent
    counts = kernel_file(place / "stat").split()
    return 512 * (int(counts[2]) + int(counts[6])) if len(counts) > 6 else None


def total_ram_bytes() -> int:
    """Bytes of physical memory, or the smallest limit on this process if that is lower."""
    return min([physical_ram_bytes(), *(limit for limit, _ in _memory_limits())])


def physical_ram_bytes() -> int:
    """Bytes of the machine's memory, whatever the limits on this process."""
    return _meminfo("MemTotal")


def free_ram_bytes() -> int:
    """Bytes this process can still allocate: available memory, cgroup limits, RLIMIT_AS."""
    free = [_meminfo("MemAvailable")]
    free += [limit - used for limit, used in _memory_limits()]
    return max(0, min(free))


def under_wsl() -> bool:
    """Whether this Linux runs inside Windows, where the GPU's driver is that of Windows."""
    return "microsoft" in kernel_file(Path("/proc/sys/kernel/osrelease")).lower()


def huge_pages() -> str:
    """The kernel's transparent huge page mode: always, madvise, never, or unknown."""
    text = kernel_file(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen.group(1) if chosen else "unknown"


def peak_ram_bytes() -> int:
    """Most bytes of resident memory that this process has had.

    Read from /proc if there is one: on Linux ru_maxrss begins with the parent's memory before exec.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text("ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def gpus() -> list[GpuInfo]:
    """NVIDIA GPUs as nvidia-smi reports them; empty if there is none, or no answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    fields = (
        "index,name,memory.total,memory.free,"
        "pcie.link.gen.max,pcie.link.width.current,driver_version"
    )
    try:
        answer = subprocess.run(
            [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (
        [cell.strip() for cell in line.split(",")] for line in answer.stdout.strip().splitlines()
    )
    return [_gpu(row) for row in rows if len(row) == 7 and row[0].isdigit()]


# Major version of CUDA -> the oldest driver that it runs on, by NVIDIA's compatibility tables.
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


def gpu_obstacle(torch_version: str, built_for: str | None, driver: str) -> str:
    """Why PyTorch does not see a GPU that nvidia-smi shows, and the mend.

    Args:
        torch_version: version of PyTorch, as in "2.9.1".
        built_for: version of CUDA, as in "13.0"; None for a build for CPUs.
        driver: version of the driver, as in "570.86.15".
    """
    if built_for is None:
        return f"torch {torch_version} is a build for CPUs: install one for CUDA"
    needed = _OLDEST_DRIVER.get(built_for.partition(".")[0])
    major = driver.partition(".")[0]
    if needed is not None and major.isdigit() and int(major) < needed:
        return (
            f"torch {torch_version} is built for CUDA {built_for}, which needs driver R{needed} or "
            f"newer, and this is {driver}: update it, or install torch for an older CUDA"
        )
    return f"torch {torch_version} cannot start CUDA {built_for} under driver {driver}"


def _gpu(row: list[str]) -> GpuInfo:
    index, name, total, free, gen, width, driver = row

    def number(text: str) -> int | None:
        return int(text) if text.isdigit() else None  # "[N/A]" on some boards

    mib = 1 << 20
    return GpuInfo(
        int(index), name, (number(total) or 0) * mib, (number(free) or 0) * mib,
        number(gen), number(width), driver,
    )  # fmt: skip


def _memory_limits() -> list[tuple[int, int]]:
    """(limit, used) in bytes of every cgroup above this process, and of its address space."""
    limits = []
    for folder in _cgroup_folders("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = kernel_file(folder / limit_name).strip()
            used = kernel_file(folder / used_name).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
                # Cached file pages count as used but are given back under pressure.
                cached = re.search(r"^(?:total_)?inactive_file (\d+)$",
                                   kernel_file(folder / "memory.stat"), re.MULTILINE)  # fmt: skip
                reclaimable = int(cached.group(1)) if cached else 0
                limits.append((int(limit), max(0, int(used) - reclaimable)))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        pages = kernel_file(Path("/proc/self/statm")).split()[:1]
        limits.append((soft, int(pages[0]) * resource.getpagesize() if pages else 0))
    return limits


def _meminfo(field: str) -> int:
    """Bytes of a /proc/meminfo field; physical memory where there is no such file (macOS)."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", kernel_file(Path("/proc/meminfo")), re.MULTILINE)
    if found:
        return int(found.group(1)) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_folders(controller: str) -> list[Path]:
    """This process's cgroup for a controller and all its parents, v2 and v1."""
    folders = []
    for line in kernel_file(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = Path("/sys/fs/cgroup")
        elif controller in controllers.split(","):
            root = Path("/sys/fs/cgroup") / controller
        else:
            continue
        folder = root / path.lstrip("/")
        while folder != root and root in folder.parents:
            folders.append(folder)
            folder = folder.parent
        folders.append(root)
    return folders
