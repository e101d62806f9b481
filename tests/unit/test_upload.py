"""Layers that stay on a device come through slabs; whatever goes wrong leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disk import Disk
from fake_links import LazyLink, LimitedLink
from torch import Tensor

from specexec_cli.errors import StreamError
from specexec_cli.offload import memory
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.reader import lay_out
from specexec_cli.offload.upload import upload

PIECE = 64 << 10
N_BYTES = 3 * PIECE + 5000  # of a layer: four pieces, and begins within a disk's block
LAYERS = 3


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= threads


@pytest.fixture
def stored() -> Tensor:
    """(layers, bytes) of all layers."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (LAYERS, N_BYTES), dtype=torch.uint8, generator=generator)


@pytest.fixture
def file(stored: Tensor, tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(stored.numpy().tobytes())
    return path


def uploaded(
    file: Path, link: LazyLink, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Tensor]:
    layouts = [
        lay_out([TensorRange("w", file, "U8", (N_BYTES,), i * N_BYTES, (i + 1) * N_BYTES)])
        for i in range(LAYERS)
    ]
    loaded = upload(layouts, link, piece_bytes=PIECE, notice=lambda text: None, progress=progress)
    return [tensors["w"] for tensors in loaded]


@pytest.mark.parametrize("pins_pieces", [0, 3, 5, 1000])
def test_layers_come_whole_however_much_is_pinned(
    stored: Tensor, file: Path, pins_pieces: int
) -> None:
    link = LimitedLink(pins_pieces * PIECE)
    told: list[tuple[int, int]] = []
    found = uploaded(file, link, lambda done, total: told.append((done, total)))
    assert torch.equal(torch.stack(found), stored)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in found)
    assert told == [((i + 1) * N_BYTES, LAYERS * N_BYTES) for i in range(LAYERS)]
    assert not link.registered


def test_two_threads_read_at_once(stored: Tensor, file: Path, disk: Disk) -> None:
    both = threading.Barrier(2, timeout=60)
    first: set[int] = set()

    def meet(*args: object) -> None:
        if threading.get_ident() not in first:
            first.add(threading.get_ident())
            both.wait()

    disk.on_read = meet
    assert torch.equal(torch.stack(uploaded(file, LazyLink())), stored)
    assert len(first) == 2


@pytest.mark.parametrize("reads_before", [0, 1, 2, 3, 7, 11])
def test_a_disk_that_fails_is_one_line(
    stored: Tensor, file: Path, reads_before: int, disk: Disk
) -> None:
    link = LazyLink()
    disk.fails_after(reads_before)
    with pytest.raises(StreamError, match=r"^reading .* failed at byte \d+: Input.* error$"):
        uploaded(file, link)
    disk.on_read = None
    assert not link.registered
    assert torch.equal(torch.stack(uploaded(file, link)), stored)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("call", ["register", "copy", "wait", "compute_mark"])
@pytest.mark.parametrize("pins_pieces", [0, 5, 1000])
def test_slabs_are_unpinned_before_they_are_unmapped(
    stored: Tensor,
    file: Path,
    pins_pieces: int,
    call: str,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever call of the link Ctrl-C or an error of CUDA comes in."""
    link = LimitedLink(pins_pieces * PIECE)
    real, calls, fails_at = getattr(link, call), 0, 0

    def fails(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise error
        return real(*args)

    close = memory.HugeBuffer.close

    def checked(buffer: memory.HugeBuffer) -> None:
        assert buffer.address not in link.registered
        close(buffer)

    monkeypatch.setattr(link, call, fails)
    monkeypatch.setattr(memory.HugeBuffer, "close", checked)
    while calls >= fails_at:  # until it would be in a call that does not come
        calls, fails_at = 0, fails_at + 1
        try:
            assert torch.equal(torch.stack(uploaded(file, link)), stored)
            assert calls < fails_at
        except error:
            assert calls >= fails_at
        assert not link.registered
        link.queue.clear()  # what is in flight of a device that failed
        link.performed = 0
    assert fails_at > (LAYERS if call == "compute_mark" else 0)
