"""A computer and its user as a test describes them.

What the package learns of a computer comes from the kernel's files, from nvidia-smi and from torch;
what a user keeps lies in folders that environment variables name. A `Computer` stands in their
place, so that a test says "64 GB are free" and patches none of the modules that ask.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from specexec_kernels import dispatch

from specexec_cli import device, loading
from specexec_cli.device import GpuInfo
from specexec_cli.models import arithmetic_probe
from specexec_cli.offload import disk_probe
from specexec_cli.offload.disk_probe import SsdProbe
from specexec_cli.planning import machine_rates
from specexec_cli.planning.machine_rates import LayerCost


class Computer:
    """The one that runs the tests, of a user who has kept nothing, without a GPU.

    Args:
        folder: an empty one, which holds what the user keeps.
        patch: undoes everything.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.hub = folder / "hub"  # the cache of huggingface_hub
        self.files: dict[str, str] = {}  # the kernel's, where they say something else
        self._patch = patch
        self._tools = folder / "tools"
        self._tools.mkdir()
        for name in ("CACHE", "CONFIG", "STATE"):
            patch.setenv(f"XDG_{name}_HOME", str(folder / name.lower()))
        patch.setenv("PATH", f"{self._tools}{os.pathsep}{os.environ['PATH']}")
        self._replace(constants, HF_HUB_CACHE=str(self.hub))
        read = device.kernel_file
        self._replace(
            device,
            kernel_file=lambda path, *most_bytes: (
                self.files[str(path)] if str(path) in self.files else read(path, *most_bytes)
            ),
        )
        self.has_cards()
        # where products were not measured, plans count cores
        self._replace(machine_rates, usable_cores=lambda: 8)

    def _replace(self, owner: object, **answers: object) -> None:
        for name, answer in answers.items():
            self._patch.setattr(owner, name, answer)

    def has_free_ram(self, n_bytes: int) -> None:
        """So much memory can still be allocated, of twice as much; no cgroup limits it."""
        kib = n_bytes // 1024
        self.files["/proc/meminfo"] = f"MemTotal: {2 * kib} kB\nMemAvailable: {kib} kB\n"
        self.files["/proc/self/cgroup"] = ""

    def has_cpu(self, name: str, *flags: str) -> None:
        """Another CPU, with these of its flags."""
        self.files["/proc/cpuinfo"] = f"model name : {name}\nflags : {' '.join(flags)}\n"

    def has_cards(self, *cards: GpuInfo) -> None:
        """nvidia-smi tells of these GPUs; torch sees none of them."""
        tool = self._tools / "nvidia-smi"
        lines = [
            f"{card.index}, {card.name}, {card.total_bytes >> 20}, {card.free_bytes >> 20}, "
            f"{card.pcie_gen}, {card.pcie_width}, {card.driver}"
            for card in cards
        ]
        tool.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines), ""]))
        tool.chmod(0o755)

    def torch_sees(self, count: int, free_bytes: Callable[[], int] = lambda: 8 * 10**9) -> None:
        """So many GPUs, on which Triton starts.

        Args:
            count: how many.
            free_bytes: asked whenever torch is asked how much of a GPU's memory is free.
        """
        self._replace(
            torch.cuda,
            is_available=lambda: count > 0,
            device_count=lambda: count,
            mem_get_info=lambda device=None: (free_bytes(),) * 2,
            empty_cache=lambda: None,
            get_device_name=lambda device=None: "Card",
        )
        self._replace(dispatch, triton_obstacle=lambda device: None)

    def torch_is(self, version: str, *, cuda: str | None = None, hip: str | None = None) -> None:
        """torch is of this version, built for CUDA or ROCm of theirs, or for CPUs."""
        self._replace(torch, __version__=version)
        self._replace(torch.version, cuda=cuda, hip=hip)

    def reads_at(self, ssd_bytes_per_s: float, link_bytes_per_s: float) -> None:
        """What a session finds where it measures its disk and the link to a GPU."""
        disk = SsdProbe(ssd_bytes_per_s, direct=True)
        self._replace(
            loading, probe_ssd=lambda *asked: disk, probe_link=lambda *asked: link_bytes_per_s
        )
        self._replace(disk_probe, probe_folder=lambda folder: disk)

    def copies_at(self, measure: Callable[[], float]) -> None:
        """What the doctor finds where the rate of memory is measured, in bytes per second."""
        self._replace(arithmetic_probe, probe_memory=measure)

    def has_free_disk(self, n_bytes: int) -> None:
        """So much room on every disk."""
        usage = shutil.disk_usage(self.hub.parent)._replace(free=n_bytes)
        self._replace(shutil, disk_usage=lambda path: usage)

    def computes_at(
        self, measure: Callable[[], tuple[tuple[int, float], ...]], layer: LayerCost
    ) -> None:
        """What a session or the doctor finds where arithmetic is measured."""
        self._replace(
            loading,
            probe_layer=lambda dtype: layer,
            probe_arithmetic=lambda dtype, bits, rounds: measure(),
        )
        self._replace(
            arithmetic_probe, probe_layer=lambda dtype: layer, probe_flops=lambda *asked: measure()
        )
