"""The ring on the device: the same tests on a GPU (pytest -m gpu) and with two stand-ins for it."""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disk import Disk
from fake_links import EagerLink, LazyLink, LimitedLink
from safetensors.torch import save_file
from torch import Tensor

from specexec_cli.config import Tier
from specexec_cli.errors import OutOfMemoryError, StreamError
from specexec_cli.offload import memory
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.cuda import DeviceStream
from specexec_cli.offload.link import CudaLink, Link
from specexec_cli.offload.slabs import FINE_PARTS, IN_FLIGHT, SLAB_BYTES
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.machine import Machine
from specexec_cli.planning.memory import Work
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.planning.tiers import plan_of

LAYERS = 5
PIECE = 64 << 10  # a layer is three of them


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


@pytest.mark.parametrize("piece_bytes", [PIECE, 16 << 20])
@pytest.mark.parametrize("device_buffers", [2, 3])
@pytest.mark.parametrize("tiers", TIERS)
def test_every_pass_hands_out_the_weights(
    layers: list[list[TensorRange]],
    weights: dict[str, Tensor],
    link: Link,
    tiers: list[Tier],
    device_buffers: int,
    piece_bytes: int,
) -> None:
    with DeviceStream(
        layers, tiers, link, device_buffers=device_buffers, piece_bytes=piece_bytes
    ) as stream:
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
    with DeviceStream(layers, tiers, link, piece_bytes=PIECE) as stream:
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
    disk: Disk,
    passes_before: int,
) -> None:
    if not passes_before:
        disk.on_read = disk.fail
    with DeviceStream(layers, ["ssd"] * LAYERS, link, host_buffers=2, device_buffers=2) as stream:
        for _ in range(passes_before):
            one_pass(stream, weights, link.device)
        disk.on_read = disk.fail
        for _ in range(2):  # and again, never a hang
            with pytest.raises(StreamError, match="failed at byte"):
                several(stream, weights, link, 3)
            stream.restart()
        disk.on_read = None
        stream.restart()
        several(stream, weights, link, 2)


def several(stream: DeviceStream, weights: dict[str, Tensor], link: Link, count: int) -> None:
    for _ in range(count):
        one_pass(stream, weights, link.device)


def test_interrupted_while_waiting_for_a_layer(
    layers: list[list[TensorRange]],
    weights: dict[str, Tensor],
    link: Link,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with DeviceStream(
        layers, ["ssd"] * LAYERS, link, device_buffers=2, piece_bytes=PIECE
    ) as stream:
        copier = stream._copier
        assert copier is not None
        real = copier.take
        for layer in range(LAYERS):
            one_pass(stream, weights, link.device)
            left = [layer + 2]

            def interrupt(left: list[int] = left) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
                return real()

            monkeypatch.setattr(copier, "take", interrupt)
            with pytest.raises(KeyboardInterrupt):
                several(stream, weights, link, 3)
            monkeypatch.setattr(copier, "take", real)
            stream.restart()
            several(stream, weights, link, 2)


@pytest.mark.parametrize("where", ["land", "_host.restart", "_copied.clear"])
def test_a_restart_that_is_interrupted_is_begun_again(
    layers: list[list[TensorRange]], weights: dict[str, Tensor], where: str
) -> None:
    link = LazyLink()
    with DeviceStream(layers, ["ssd", "ram"] * 2 + ["ssd"], link, piece_bytes=PIECE) as stream:
        copier = stream._copier
        assert copier is not None
        with stream.layer(0):
            pass
        owner: Any = {
            "land": copier._uplink, "_host.restart": copier._host, "_copied.clear": copier
        }[where]  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            if where == "_copied.clear":
                patch.setattr(owner, "_copied", Stubborn(copier._copied))
            else:
                patch.setattr(owner, where.rpartition(".")[2], interrupted)
            with pytest.raises(KeyboardInterrupt):
                stream.restart()
        stream.restart()
        several(stream, weights, link, 2)


def interrupted() -> None:
    raise KeyboardInterrupt


class Stubborn(dict[int, Any]):
    """Cannot be emptied before Ctrl-C comes."""

    def clear(self) -> None:
        raise KeyboardInterrupt


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


@pytest.mark.parametrize("tiers", TIERS[1:4])
@pytest.mark.parametrize("pieces", [0, 2, 3, 5, 12, 1000])
def test_where_little_can_be_pinned_the_rest_goes_through_slabs(
    layers: list[list[TensorRange]], weights: dict[str, Tensor], tiers: list[Tier], pieces: int
) -> None:
    link = LimitedLink(pieces * PIECE)
    told: list[str] = []
    with DeviceStream(layers, tiers, link, piece_bytes=PIECE, notice=told.append) as stream:
        pinned = sum(link.pinned.values())
        several(stream, weights, link, 3)
    if pieces == 1000:
        assert not told
        return
    assert len(told) == 1
    if pieces < 3:  # not even the slabs
        assert pinned == 0
        assert "refuses to pin" in told[0]
    else:
        assert 3 * PIECE <= pinned < link.limit or pieces == 3
        assert "and no more" in told[0]


def test_a_layer_goes_in_pieces_of_which_few_are_in_flight(
    layers: list[list[TensorRange]], weights: dict[str, Tensor]
) -> None:
    link = LazyLink()
    longest: list[int] = []
    most_bytes: list[int] = []
    copy = link.copy

    def noted(target: Tensor, source: Tensor, after: Any) -> Any:
        event = copy(target, source, after)
        longest.append(len(link.queue))
        most_bytes.append(sum(waiting.numel() for _, waiting in link.queue))
        assert source.numel() <= PIECE
        return event

    link.copy = noted  # type: ignore[method-assign]
    with DeviceStream(layers, ["ram", "ssd"] * 2 + ["ram"], link, piece_bytes=PIECE) as stream:
        several(stream, weights, link, 2)
    assert max(longest) == FINE_PARTS
    assert PIECE < max(most_bytes) <= IN_FLIGHT * PIECE


def test_layers_are_copied_while_nobody_asks_for_one(
    layers: list[list[TensorRange]], weights: dict[str, Tensor]
) -> None:
    """As while the drafter works: the ring is full before the pass begins."""
    link = EagerLink()
    copied = threading.Semaphore(0)
    copy = link.copy

    def noted(target: Tensor, source: Tensor, after: Any) -> Any:
        copied.release()
        return copy(target, source, after)

    link.copy = noted  # type: ignore[method-assign]
    with DeviceStream(layers, ["ram", "ssd"] * 2 + ["ram"], link, piece_bytes=PIECE) as stream:
        assert stream._copier is not None
        pieces = sum(len(cut) for cut in stream._copier._pieces[:3])
        for _ in range(pieces):
            assert copied.acquire(timeout=60)
        several(stream, weights, link, 2)


@pytest.mark.parametrize("shortage", [True, False])
def test_an_error_of_the_copying_thread_ends_the_pass_and_no_more(
    layers: list[list[TensorRange]], weights: dict[str, Tensor], shortage: bool
) -> None:
    link = EagerLink()
    copy, left = link.copy, [7]

    def fails_once(target: Tensor, source: Tensor, after: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            message = "CUDA error: launch failure\nmore of it"
            raise torch.OutOfMemoryError(message) if shortage else RuntimeError(message)
        return copy(target, source, after)

    link.copy = fails_once  # type: ignore[method-assign]
    with DeviceStream(layers, ["ram", "ssd"] * 2 + ["ram"], link, piece_bytes=PIECE) as stream:
        expected: tuple[type[Exception], str] = (
            (torch.OutOfMemoryError, "launch failure")
            if shortage
            else (StreamError, "copying a layer to the GPU failed: CUDA error: launch failure$")
        )
        with pytest.raises(expected[0], match=expected[1]):
            several(stream, weights, link, 3)
        stream.restart()
        several(stream, weights, link, 2)


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


@pytest.mark.parametrize("limit", [0, 500_000, 1 << 40])
@pytest.mark.parametrize("tier", ["resident", "ram", "ssd"])
def test_no_more_ram_is_taken_than_was_planned(
    tier: Tier, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slabs included; layers are larger than a slab, so that slabs have their full size."""
    n_bytes, count = 20 << 20, 4
    file = tmp_path / "weights"
    with file.open("wb") as out:
        out.truncate(n_bytes)  # every layer has the same bytes
    layers = [[TensorRange(f"{i}", file, "U8", (n_bytes,), 0, n_bytes)] for i in range(count)]
    target = ModelBytes(
        layers=(n_bytes,) * count, resident=0, layer_params=n_bytes, largest_matrix=1,
        active_params=1, kv_elements=1, hidden=1, intermediate=1, vocab=1,
    )  # fmt: skip
    machine = Machine(ram_bytes=10**9, vram_bytes=10**9, base_bytes=0)
    plan = plan_of(target, None, Work(), machine, [tier] * count, 2, 2)
    live = peak = 0
    make = memory.HugeBuffer.__init__

    def counted(buffer: memory.HugeBuffer, size: int, *args: Any) -> None:
        nonlocal live, peak
        make(buffer, size, *args)
        live += size
        peak = max(peak, live)
        weakref.finalize(buffer._mapping, gone, size)

    def gone(size: int) -> None:
        nonlocal live
        live -= size

    monkeypatch.setattr(memory.HugeBuffer, "__init__", counted)
    with DeviceStream(
        layers, [tier] * count, LimitedLink(limit), host_buffers=2, device_buffers=2
    ) as stream:
        for layer in range(count):
            with stream.layer(layer):
                pass
    assert live == 0
    assert plan.peak_ram_bytes - SLAB_BYTES < peak <= plan.peak_ram_bytes


@pytest.mark.parametrize("limit", [0, 5 * PIECE, 1 << 40])
def test_opening_is_undone_wherever_memory_ends(
    layers: list[list[TensorRange]],
    weights: dict[str, Tensor],
    limit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RAM for slabs and layers, memory of the device: each allocation fails once."""
    tiers: list[Tier] = ["ram", "ssd", "resident", "ssd", "ram"]
    mapped, empty = memory.mmap.mmap, torch.empty
    left, threads = [0], set(threading.enumerate())

    def counted(make: Any, shortage: BaseException) -> Any:
        def one(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise shortage
            return make(*args, **kwargs)

        return one

    monkeypatch.setattr(memory.mmap, "mmap", counted(mapped, OSError(errno.ENOMEM, "no memory")))
    monkeypatch.setattr(torch, "empty", counted(empty, torch.OutOfMemoryError("CUDA: no\nmemory")))
    failures = 0
    while left[0] <= 0:  # until more allocations may succeed than there are
        left[0] = failures + 1
        link = LimitedLink(limit)
        try:
            with DeviceStream(layers, tiers, link, piece_bytes=PIECE) as stream:
                one_pass(stream, weights, link.device)
        except OutOfMemoryError:
            failures += 1
        assert not link.registered
        assert set(threading.enumerate()) <= threads
    assert failures > 15
