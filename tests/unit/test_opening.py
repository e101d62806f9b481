"""--device: a name becomes a device that is here, with its number."""

from __future__ import annotations

import pytest
import torch

from specexec_cli.errors import ConfigError
from specexec_cli.opening import pick_device


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
    with pytest.raises(ConfigError, match="--device cuda:2: the last CUDA device here is cuda:1"):
        pick_device("cuda:2")
