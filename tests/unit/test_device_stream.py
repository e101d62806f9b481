"""The ring on the device: the same tests on a GPU (pytest -m gpu) and with two stand-ins for it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specexec_cli.config import Tier
from specexec_cli.errors import OutOfMemoryError, StreamError
from specexec_cli.offload.cuda import DeviceStream
from specexec_cli.offload.link import CudaLink, Link
from specexec_cli.offload.store import TensorRange, read_checkpoint

LAYERS = 5


class EagerLink:
    """Copies happen at once: nothing may be copied into a slot that is still in use."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def register(self, blob: Tensor) -> bool:
        assert blob.data_ptr() % 4096 == 0
        self.registered.add(blob.data_ptr())
        return True

    def unregister(self, blob: Tensor) -> None:
        self.registered.remove(blob.data_ptr())

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        assert after is not None
        target.copy_(source)
        return True

    def compute_waits(self, event: Any) -> None:
        pass

    def compute_mark(self) -> Any:
        return True

    def done(self, event: Any) -> bool:
        return True

    def wait(self, event: Any) -> None:
        pass


class LazyLink(EagerLink):
    """Copies happen only when somebody waits for them: every wait that is needed must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.performed = 0

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        self.queue.append((target, source))
        return self.performed + len(self.queue)

    def compute_waits(self, event: Any) -> None:
        self.wait(event)

    def compute_mark(self) -> Any:
        return 0  # computing on the CPU is over when it returns

    def done(self, event: Any) -> bool:
        return event <= self.performed

    def wait(self, event: Any) -> None:
        while self.performed < event:
            target, source = self.queue.pop(0)
            target.copy_(source)
            self.performed += 1


@pytest.fixture(params=["eager", "lazy", pytest.param("cuda", marks=pytest.mark.gpu)])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device")
        yield CudaLink(torch.device("cuda", 0))
        return
    fake = EagerLink() if request.param == "eager" else LazyLink()
    yield fake
    assert not fake.registered  # all memory was given back to the system unpinned


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    # one of an earlier test's may have ended meanwhile
    assert set(threading.enumerate()) <= threads


@pytest.fixture
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{layer}.{name}": torch.randn(size, generator=generator).to(dtype)
        for layer in range(LAYERS)
        for name, size, dtype in (("a", (300, 257), torch.bfloat16), ("b", (33,), torch.float32))
    }


@pytest.fixture
def layers(tmp_path: Path, weights: dict[str, Tensor]) -> list[list[TensorRange]]:
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    return [
        [checkpoint[name] for name in weights if name.startswith(f"{layer}.")]
        for layer in range(LAYERS)
    ]


def one_pass(stream: DeviceStream, weights: dict[str, Tensor], device: torch.device) -> None:
    for layer in range(LAYERS):
        with stream.layer(layer) as tensors:
            assert set(tensors) == {name for name in weights if name.startswith(f"{layer}.")}
            for name, tensor in tensors.items():
                assert tensor.device.type == device.type
                assert torch.equal(tensor.cpu(), weights[name]), name


def test_layers_begin_where_kernels_load_16_bytes_at_once(
    layers: list[list[TensorRange]], link: Link
) -> None:
    assert {min(tensor.start for tensor in layer) % 16 for layer in layers} != {0}
    with DeviceStream(layers, ["ram"] * LAYERS, link) as stream:
        for layer in range(LAYERS):
            with stream.layer(layer) as tensors:
                assert min(tensor.data_ptr() for tensor in tensors.values()) % 16 == 0


TIERS: list[list[Tier]] = [
    ["resident"] * 5,
    ["ram"] * 5,
    ["ssd"] * 5,
    ["resident", "ram", "ssd", "ssd", "resident"],
    ["ssd", "resident", "resident", "resident", "ram"],
    ["ram", "resident", "resident", "resident", "resident"],
]


@pytest.mark.parametrize("device_buffers", [2, 3])
@pytest.mark.parametrize("tiers", TIERS)
def test_every_pass_hands_out_the_weights(
    layers: list[list[TensorRange]],
    weights: dict[str, Tensor],
    link: Link,
    tiers: list[Tier],
    device_buffers: int,
) -> None:
    with DeviceStream(layers, tiers, link, device_buffers=device_buffers) as stream:
        for _ in range(4):
            one_pass(stream, weights, link.device)
        streamed = sum(
            tensor.n_bytes
            for layer, tier in zip(layers, tiers, strict=True)
            for tensor in layer
            if tier != "resident"
        )
        assert stream.bytes_streamed == 4 * streamed


@pytest.mark.parametrize("tiers", TIERS[1:4])
@pytest.mark.parametrize("layers_done", [0, 1, 3, LAYERS])
def test_restart_after_an_aborted_pass(
    layers: list[list[TensorRange]],
    weights: dict[str, Tensor],
    link: Link,
    tiers: list[Tier],
    layers_done: int,
) -> None:
    with DeviceStream(layers, tiers, link) as stream:
        for layer in range(layers_done):
            with stream.layer(layer):
                pass
        stream.restart()
        one_pass(stream, weights, link.device)
        with pytest.raises(ZeroDivisionError), stream.layer(0):
            _ = 1 // 0
        stream.restart()
        one_pass(stream, weights, link.device)
        one_pass(stream, weights, link.device)


@pytest.mark.parametrize("passes_before", [0, 1])
def test_a_read_error_surfaces_and_restart_recovers(
    layers: list[list[TensorRange]],
    weights: dict[str, Tensor],
    link: Link,
    monkeypatch: pytest.MonkeyPatch,
    passes_before: int,
) -> None:
    real, broken = os.preadv, threading.Event()

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if broken.is_set():
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    if not passes_before:
        broken.set()
    with DeviceStream(layers, ["ssd"] * LAYERS, link, host_buffers=2, device_buffers=2) as stream:
        for _ in range(passes_before):
            one_pass(stream, weights, link.device)
        broken.set()
        for _ in range(2):  # and again, never a hang
            with pytest.raises(StreamError, match="failed at byte"):
                several(stream, weights, link, 3)
            stream.restart()
        broken.clear()
        stream.restart()
        several(stream, weights, link, 2)


def several(stream: DeviceStream, weights: dict[str, Tensor], link: Link, count: int) -> None:
    for _ in range(count):
        one_pass(stream, weights, link.device)


def test_interrupted_while_waiting_for_the_disk(
    layers: list[list[TensorRange]],
    weights: dict[str, Tensor],
    link: Link,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with DeviceStream(layers, ["ssd"] * LAYERS, link, device_buffers=2) as stream:
        host = stream._host
        assert host is not None
        real = host._wait_for_turn
        for layer in range(LAYERS):
            one_pass(stream, weights, link.device)
            left = [layer + 2]

            def interrupt(left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
                real()

            monkeypatch.setattr(host, "_wait_for_turn", interrupt)
            with pytest.raises(KeyboardInterrupt):
                several(stream, weights, link, 3)
            monkeypatch.setattr(host, "_wait_for_turn", real)
            stream.restart()
            several(stream, weights, link, 2)


def test_wrong_order_is_our_bug(layers: list[list[TensorRange]], link: Link) -> None:
    with (
        DeviceStream(layers, ["ram"] * LAYERS, link) as stream,
        pytest.raises(RuntimeError, match="layer 1 asked for, next is 0"),
        stream.layer(1),
    ):
        pass


def test_memory_that_cannot_be_pinned_is_told_once(
    layers: list[list[TensorRange]], weights: dict[str, Tensor]
) -> None:
    refusing = EagerLink()
    refusing.register = lambda blob: False  # type: ignore[method-assign]
    told: list[str] = []
    tiers: list[Tier] = ["ram", "ssd", "ram", "ssd", "ram"]
    with DeviceStream(layers, tiers, refusing, notice=told.append) as stream:
        one_pass(stream, weights, refusing.device)
    assert len([text for text in told if "refuses to pin memory" in text]) == 1


def test_device_memory_that_runs_out_is_one_line(
    layers: list[list[TensorRange]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(*args: object, **kwargs: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nlots")

    eager = EagerLink()
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(OutOfMemoryError, match=r"buffer on the device needs 311 kB of GPU memory"):
        DeviceStream(layers, ["ram"] * LAYERS, eager)
    assert not eager.registered
