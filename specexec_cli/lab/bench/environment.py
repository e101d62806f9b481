"""Records the circumstances of a result: commit, versions, hardware, and how bytes were read."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexec_cli import __version__
from specexec_cli.device import cpu_info, gpus, total_ram_bytes

if TYPE_CHECKING:
    from specexec_cli.session import TextSession

_PACKAGES = ("torch", "transformers", "numpy", "safetensors")


def environment() -> dict[str, Any]:
    """Commit, versions and hardware; part of every row and of its key."""
    cpu = cpu_info()
    return {
        "commit": _commit(),
        "versions": {"specexec": __version__, "python": platform.python_version(), **_versions()},
        "hardware": {
            "cpu": cpu.name,
            "cores": cpu.cores,
            "ram_bytes": total_ram_bytes(),
            "gpus": [gpu.name for gpu in gpus()],
        },
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def _commit() -> str | None:
    """The source tree's commit, with '-dirty' if files were changed; None outside a checkout."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        name = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{name}-dirty" if changed else name


def _git(root: Path, *arguments: str) -> str:
    answer = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20, check=True
    )
    return answer.stdout.strip()


def link(session: TextSession) -> dict[str, Any]:
    """Measures how fast weights can be streamed at best, and says how they are streamed.

    Raises:
        StreamError: the disk cannot be read.
    """
    from specexec_cli.catalog.hub import fetch
    from specexec_cli.models.arithmetic_probe import probe_memory
    from specexec_cli.offload.disk_probe import probe_ssd
    from specexec_cli.offload.link_probe import probe_link
    from specexec_cli.offload.store import read_checkpoint

    offload, device = session.settings["offload"], session.settings["device"]
    if offload == "none":
        return {"io": "resident: no weights are streamed", "link_bytes_per_s": None}
    rates, io = [], "from RAM"
    if "ssd" in offload:
        folder = fetch(session.pair.target, offline=True)
        files = sorted({tensor.path for tensor in read_checkpoint(folder).values()})
        probe = probe_ssd(files)
        rates.append(probe.bytes_per_s / session.ssd_share)
        io = "from SSD, " + ("O_DIRECT: no page cache" if probe.direct else "page cache possible")
    if device.startswith("cuda"):
        rates.append(probe_link(device))
    elif offload == "ram":
        rates.append(probe_memory())
    return {"io": io, "link_bytes_per_s": min(rates)}


def reset_peak_memory(device: str) -> None:
    """Resets the process's peak memory, where the system allows it (Linux)."""
    # elsewhere the peak is the whole process's, which is never less than the run's
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
