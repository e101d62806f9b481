"""Devices by name: each becomes a device of this machine; a GPU that is not used is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from computer import Computer
from fake_cuda import CUDA, fake_cuda

from specexec_cli.device import GpuInfo
from specexec_cli.dsi.layout import Layout
from specexec_cli.errors import ConfigError, WorkerError
from specexec_cli.loading import pick_device, site_of_workers, this_site
from specexec_cli.offload import link
from specexec_cli.planning.memory import GPU_CONTEXT_BYTES, GPU_LIBRARY_BYTES
from specexec_cli.session import Session

GB = 10**9


@pytest.fixture
def two_gpus(computer: Computer) -> None:
    computer.torch_sees(2)


@pytest.mark.parametrize(
    ("name", "device"),
    [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
)
def test_a_gpu_is_named_with_its_number(name: str, device: str, two_gpus: None) -> None:
    assert pick_device(name) == torch.device(device)


def test_a_gpu_that_is_not_there(two_gpus: None) -> None:
    with pytest.raises(ConfigError, match="`device='cuda:2'`: the last CUDA device here is cuda:1"):
        pick_device("cuda:2")


@pytest.mark.parametrize(("servers", "vram_bytes"), [(1, 6 * GB), (2, 6 * GB), (3, 3 * GB)])
def test_target_servers_are_planned_for_the_fullest_device(
    servers: int, vram_bytes: int, computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free was asked for by a process whose context is gone."""
    asked = GPU_CONTEXT_BYTES - GPU_LIBRARY_BYTES
    free = {"cuda:0": 8 * GB - asked, "cuda:1": 6 * GB - asked}
    monkeypatch.setattr(link, "free_vram", lambda devices: [free[str(each)] for each in devices])
    computer.has_free_ram(12 * 10**9)
    site = site_of_workers(Layout(devices=["cuda:0", "cuda:1"], servers=servers))
    assert site.device == "cuda:0"
    assert site.settings["ram"].value == 12 * 10**9 // 1024 * 1024 // servers
    assert site.settings["vram"].value == vram_bytes


def test_another_process_tells_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    devices = [torch.device("cuda", number) for number in range(2)]
    stand_in = tmp_path / "torch.py"
    stand_in.write_text(
        "device = str\nclass cuda:\n    mem_get_info = lambda name: (5 + int(name[-1]), 9)\n"
    )
    assert link.free_vram(devices) == [5, 6]
    stand_in.write_text("raise RuntimeError('no driver')")
    with pytest.raises(WorkerError, match="of cuda:0, cuda:1 is to be had: RuntimeError: no drive"):
        link.free_vram(devices)


@pytest.mark.parametrize(
    ("built_for", "driver", "reason"),
    [
        (None, "580.65.06", "torch 9.9 is a build for CPUs: install one for CUDA"),
        ("13.0", "570.86.15", "is built for CUDA 13.0, which needs driver R580 or newer, and this"),
        ("12.8", "470.82.01", "is built for CUDA 12.8, which needs driver R525 or newer, and this"),
        ("13.0", "580.65.06", "torch 9.9 cannot start CUDA 13.0 under driver 580.65.06"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_told_on_every_run(
    built_for: str | None, driver: str, reason: str, computer: Computer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    computer.has_cards(GpuInfo(0, "NVIDIA GeForce RTX 4090", 24 << 30, 24 << 30, 4, 16, driver))
    computer.torch_sees(0)
    computer.torch_is("9.9", cuda=built_for)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told: list[str] = []
    Session.open(model="demo", notice=told.append).close()
    assert len(told) == 1
    assert told[0].startswith("the CPU computes, not the NVIDIA GeForce RTX 4090: ")
    assert reason in told[0]
    Session.open(model="demo", device="cpu", notice=told.append).close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Session.open(model="demo", notice=told.append).close()
    assert len(told) == 1, "nothing is amiss where the CPU was asked for, or the GPU was hidden"


def test_rocm_is_refused_by_name(computer: Computer, two_gpus: None) -> None:
    """torch's builds for AMD's GPUs call them cuda; its kernels there are not those tried here."""
    computer.torch_is("9.9+rocm", hip="7.1")
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"`device='cuda'`: torch 9\.9\+rocm is built for ROCm"):
        pick_device("cuda")
    told: list[str] = []
    Session.open(model="demo", notice=told.append).close()
    assert told == [
        "the CPU computes: torch 9.9+rocm is built for ROCm, and AMD's GPUs are not supported"
    ]
    Session.open(model="demo", device="cpu", notice=told.append).close()
    assert len(told) == 1, "the CPU was asked for"


def test_what_is_free_is_asked_with_the_context_in_place(computer: Computer) -> None:
    """The context takes RAM too, which is then no longer free; and it is not counted again."""
    computer.has_free_ram(14 * GB)

    def context() -> int:
        computer.has_free_ram(12 * GB)
        return 8 * GB

    computer.torch_sees(2, context)
    machine = this_site(pick_device("cuda:0")).machine("float16")
    assert machine.ram_bytes == pytest.approx(12 * GB, abs=1024)
    assert machine.vram_bytes == 8 * GB
    assert machine.context_bytes == GPU_LIBRARY_BYTES < GPU_CONTEXT_BYTES


@pytest.mark.parametrize(("triton", "obstacle"), [(False, "not wanted"), (True, None)])
def test_a_session_plans_for_a_gpu_without_triton(triton: bool, obstacle: str | None) -> None:
    with fake_cuda(triton=triton):
        site = this_site(CUDA)
    assert site.machine("float16").triton_obstacle == obstacle
