"""--device: a name becomes a device that is here, with its number."""

from __future__ import annotations

import pytest
import torch

from specexec_cli import loading
from specexec_cli.errors import ConfigError
from specexec_cli.loading import pick_device, this_site

GB = 10**9


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("name", "device"),
    [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
)
def test_a_gpu_is_named_with_its_number(name: str, device: str, two_gpus: None) -> None:
    assert pick_device(name) == torch.device(device)


def test_a_gpu_that_is_not_there(two_gpus: None) -> None:
    with pytest.raises(ConfigError, match="`device='cuda:2'`: the last CUDA device here is cuda:1"):
        pick_device("cuda:2")


@pytest.mark.parametrize(("copies", "vram_bytes"), [(1, 6 * GB), (2, 6 * GB), (3, 3 * GB)])
def test_copies_of_the_target_are_placed_for_the_fullest_device(
    copies: int, vram_bytes: int, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {0: 8 * GB, 1: 6 * GB}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 0))
    monkeypatch.setattr(loading, "free_ram_bytes", lambda: 12 * GB)
    devices = [pick_device(name) for name in ("cuda:0", "cuda:1")]
    site = this_site(devices, copies)
    assert site.device == "cuda:0"
    assert site.settings["ram"].value == 12 * GB // copies
    assert site.settings["vram"].value == vram_bytes
