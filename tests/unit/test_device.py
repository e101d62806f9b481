import os
import resource
from pathlib import Path

import pytest
from computer import Computer

from specexec_cli import device


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (812e6, "812 MB"), (35.26e9, "35.3 GB")],
)
def test_bytes_are_shown_in_decimal_units(n_bytes: float, text: str) -> None:
    assert device.format_bytes(n_bytes) == text


def test_this_machine() -> None:
    cpu = device.cpu_info()
    assert 1 <= cpu.cores <= (os.cpu_count() or 1)
    assert set(cpu.flags) <= set(device.FAST_FLAGS)
    assert 0 < device.free_ram_bytes() <= device.total_ram_bytes()
    assert device.peak_ram_bytes() > 1 << 20


MEMINFO = "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\n"


def test_cgroup_v2_limits_of_the_parents_count(computer: Computer) -> None:
    computer.files |= {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/b/memory.max": "max\n",
        "/sys/fs/cgroup/a/b/memory.current": "1000\n",
        "/sys/fs/cgroup/a/memory.max": "4000000000\n",
        "/sys/fs/cgroup/a/memory.current": "3000000000\n",
        "/sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 1000000000\nactive_file 7\n",
        "/sys/fs/cgroup/memory.max": "max\n",
    }
    assert device.total_ram_bytes() == 4_000_000_000
    assert device.free_ram_bytes() == 2_000_000_000  # cached files are given back


def test_cgroup_v1_limit_and_no_limit(computer: Computer) -> None:
    computer.files |= {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n",
        "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/x/memory.usage_in_bytes": "1000\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert device.free_ram_bytes() == 8_000_000 * 1024
    computer.files["/sys/fs/cgroup/memory/x/memory.limit_in_bytes"] = "5000\n"
    assert device.free_ram_bytes() == 4000


def test_address_space_limit(computer: Computer) -> None:
    page, limit = resource.getpagesize(), 1 << 45
    computer.has_free_ram(1 << 50)
    computer.files["/proc/self/statm"] = "10 5 1\n"
    usual = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, usual[1]))
    try:
        assert device.free_ram_bytes() == limit - 10 * page
        assert device.total_ram_bytes() == limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)


@pytest.mark.parametrize(
    "files",
    [
        {"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/cpu.max": "50000 100000\n"},
        {"/proc/self/cgroup": "4:cpu,cpuacct:/a\n",
         "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000\n",
         "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"},
    ],
    ids=["v2", "v1"],
)  # fmt: skip
def test_cpu_quota(files: dict[str, str], computer: Computer) -> None:
    usable = len(os.sched_getaffinity(0))
    computer.files |= files
    assert device.usable_cores() == 1  # a started half counts
    name = next(name for name in files if name.endswith(("cpu.max", "quota_us")))
    for said, cores in (("150000 100000", 2), ("max 100000", usable), ("-1", usable)):
        computer.files[name] = said.split()[0] if name.endswith("us") else said
        assert device.usable_cores() == min(usable, cores)


def test_nvidia_smi_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        "echo '0, NVIDIA H100 80GB HBM3, 81559, 81000, 5, 16, 570.86.15'\n"
        "echo '1, Odd Board, 100, 50, [N/A], [N/A], 570.86.15'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    first, second = device.gpus()
    assert (first.name, first.pcie_gen, first.pcie_width) == ("NVIDIA H100 80GB HBM3", 5, 16)
    assert first.total_bytes == 81559 << 20
    assert (second.pcie_gen, second.free_bytes) == (None, 50 << 20)
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert device.gpus() == []
    tool.unlink()
    assert device.gpus() == []
