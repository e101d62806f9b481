import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cuda as fake
import pytest
import torch
from disk import Disk
from fake_cuda import fake_cuda
from faults import NoMemory, points
from specexec_kernels import cpu_layer, dispatch
from specexec_kernels.formats.base import PackedWeight
from torch import Tensor
from torch.nn.functional import linear

from specexec_cli.errors import OutOfMemoryError, StreamError
from specexec_cli.models.arithmetic_probe import layer_cost, probe_flops, probe_layer, probe_memory
from specexec_cli.offload import link_probe, uplink
from specexec_cli.offload.disk_probe import probe_folder, probe_ssd
from specexec_cli.offload.link_probe import probe_link
from specexec_cli.offload.slabs import COPY_BYTES
from specexec_cli.planning.machine_rates import PACKED_BITS


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads, fds = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    # one of an earlier test's may have ended meanwhile
    left = set(threading.enumerate()) - threads
    assert all(thread.name.startswith("kernel-team") for thread in left)  # it stays
    assert len(os.listdir("/proc/self/fd")) == fds


def test_reads_cover_the_files_at_random(tmp_path: Path, disk: Disk) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(bytes((1 << 20) + 100))
    offsets = set()
    disk.on_read = lambda fd, targets, at: offsets.add((os.readlink(f"/proc/self/fd/{fd}"), at))
    assert probe_ssd(paths, seconds=0.2, run_bytes=256 << 10).bytes_per_s > 0
    assert {name for name, _ in offsets} == {str(path) for path in paths}
    assert len({offset for _, offset in offsets}) > 3
    assert all(offset % 4096 == 0 for _, offset in offsets)


def test_the_end_of_a_file_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"x" * 5000)
    assert probe_ssd([path], seconds=0.02).bytes_per_s > 0


def test_failures_are_stream_errors(tmp_path: Path, disk: Disk) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(StreamError, match="no file to measure"):
        probe_ssd([empty])
    with pytest.raises(StreamError, match="cannot open"):
        probe_ssd([tmp_path / "gone"])
    with pytest.raises(StreamError, match=r"cannot write to .*gone"):
        probe_folder(tmp_path / "gone")
    path = tmp_path / "broken"
    path.write_bytes(bytes(8192))

    disk.on_read = disk.fail
    with pytest.raises(StreamError, match="broken failed at byte 0: Input/output error"):
        probe_ssd([path])


def test_refused_o_direct_is_told(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    disk.refuses_direct = "open"
    assert not probe_ssd([path], seconds=0.02).direct


def test_a_folder_without_weights_gets_a_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.safetensors").write_bytes(b"x")
    found = probe_folder(tmp_path, seconds=0.05, temporary_bytes=8 << 20)
    assert found.bytes_per_s > 0
    assert found.n_bytes >= 8 << 20, "the file was written first"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.safetensors"]


def test_a_folder_with_weights_is_only_read(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.safetensors").write_bytes(bytes(8192))
    read = set()
    disk.on_read = lambda fd, *more: read.add(os.readlink(f"/proc/self/fd/{fd}"))
    assert probe_folder(tmp_path, seconds=0.02, run_bytes=4096).bytes_per_s > 0
    assert read == {str(tmp_path / "sub" / "w.safetensors")}


def test_memory_and_arithmetic() -> None:
    assert probe_memory(1 << 20, repeats=2) > 0
    seen = set()

    def spy(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.add((tuple(rows.shape), rows.dtype, weight.dtype, weight.data_ptr()))
        return linear(rows, weight.to(rows.dtype))

    points = probe_flops(
        torch.bfloat16, torch.float32, spy, rows=(1, 32), weight_bytes=4 * 8192, width=64
    )
    assert [rows for rows, _ in points] == [1, 32]
    assert all(rate > 0 for _, rate in points)
    assert len({item for item in seen if item[0] == (1, 64)}) == 4  # no cache holds them all
    assert {item[1:3] for item in seen} == {(torch.float32, torch.bfloat16)}


def test_what_a_layer_takes_besides_products_is_told_apart() -> None:
    """From passes of one row, of many, and of many behind a prefix."""

    def layer_s(rows: int, prefix: int) -> float:
        return 1e-3 + rows * (1e-4 + (prefix + rows) * 1e-7)

    found = layer_cost(layer_s(1, 0), layer_s(128, 0), layer_s(128, 256), 128, 256)
    expected = (1e-3, 1e-4, 1e-7)
    assert (found.layer_s, found.row_s, found.slot_s) == pytest.approx(expected, rel=0.01)
    found = probe_layer("bfloat16", rows=8, prefix=8, seconds=0.0)
    assert found.seconds(4096, 11008, 1, 1) > 0
    assert min(found.layer_s, found.row_s, found.slot_s) >= 0


def test_layers_that_are_one_call_are_measured_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose linears hold no weights never is one."""
    called: list[int] = []
    run = cpu_layer.Program.run

    def counted(self: cpu_layer.Program, *args: Any) -> Tensor:
        called.append(self.rows)
        return run(self, *args)

    monkeypatch.setattr(cpu_layer.Program, "run", counted)
    found = probe_layer("bfloat16", rows=8, prefix=8, seconds=0.0)
    assert set(called) == {1}
    assert found.call_s is not None
    assert found.call_s > 0


def test_arithmetic_of_packed_weights() -> None:
    for bits in PACKED_BITS:
        weights = []

        def spy(
            rows: torch.Tensor, weight: PackedWeight, weights: list[PackedWeight] = weights
        ) -> torch.Tensor:
            weights.append(weight)
            return dispatch.quantized_matmul(rows, weight)

        points = probe_flops(
            bits, torch.float32, spy, rows=(1, 8), weight_bytes=bits * 3 * 8192, width=256
        )
        assert [rows for rows, _ in points] == [1, 8]
        assert {weight.format.bits for weight in weights} == {bits}
        assert len({weight.tensors["qweight"].data_ptr() for weight in weights}) == 3


def test_a_busy_machine_measures_fewer_rows() -> None:
    points = probe_flops(torch.float32, torch.float32, linear, weight_bytes=1, seconds=0.0, width=8)
    assert [rows for rows, _ in points] == [1, 128]


@pytest.mark.parametrize(
    ("pins_pieces", "expected"), [(0, 1e9), (5, 1 / (0.1 / 4e9 + 0.9 / 2e9)), (1000, 4e9)]
)
def test_the_link_is_measured_on_the_way_that_layers_will_go(
    pins_pieces: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned pieces at 4 GB/s, those through slabs at 2, those that are not pinned at 1."""
    sent: list[float] = []
    send = uplink.Uplink.send

    def timed(self: uplink.Uplink, target: Tensor, source: Tensor, after: Any) -> Any:
        rate = 4e9 if self.is_pinned(source) else 2e9 if self._slabs else 1e9
        sent.append(source.numel() / rate)
        return send(self, target, source, after)

    def best_of(repeats: int, run: Callable[[], object]) -> float:
        sent.clear()
        run()
        return sum(sent)

    monkeypatch.setattr(uplink.Uplink, "send", timed)
    monkeypatch.setattr(link_probe, "best_of", best_of)
    piece = COPY_BYTES
    with fake_cuda(pins_bytes=pins_pieces * piece) as runtime:
        # three are slabs, one is left to others: of five, one piece of ten
        found = probe_link(fake.CUDA, n_bytes=2 * piece, streamed_bytes=10 * piece)
        assert not runtime.registered
    assert found == pytest.approx(expected)


def test_no_more_is_pinned_for_a_probe_than_the_largest_known_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned = []
    pin = uplink.Uplink.pin

    def noted(self: uplink.Uplink, blobs: list[Tensor]) -> bool:
        pinned.append(sum(blob.numel() for blob in blobs))
        return pin(self, blobs)

    monkeypatch.setattr(uplink.Uplink, "pin", noted)
    with fake_cuda():
        for streamed_bytes in (0, 3 * COPY_BYTES, 1 << 40):
            probe_link(fake.CUDA, COPY_BYTES, streamed_bytes, 1, most_pinned_bytes=4 * COPY_BYTES)
    assert [n_bytes // COPY_BYTES for n_bytes in pinned] == [1, 3, 4]


@pytest.mark.parametrize("pins_pieces", [0, 4, 1000])
def test_memory_that_ends_while_the_link_is_measured_is_one_line(pins_pieces: int) -> None:
    """Also where a refusal to pin has been answered just before, which CUDA reports later."""

    def measure(fault: NoMemory) -> None:
        with fake_cuda(pins_bytes=pins_pieces * COPY_BYTES), fault:
            probe_link(fake.CUDA, COPY_BYTES, 4 * COPY_BYTES, repeats=1)

    recorded = NoMemory()
    measure(recorded)
    ends = points(recorded.sites)
    assert ends
    for point in ends:
        fault = NoMemory(point)
        with pytest.raises(OutOfMemoryError, match=r"^the GPU's memory is too small: [^\n]*$"):
            measure(fault)
        assert fault.fired
