import mmap
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from computer import Computer
from disk import Disk
from safetensors.torch import save_file
from torch import Tensor

from specexec_cli.config import Tier
from specexec_cli.errors import OutOfMemoryError, StreamError
from specexec_cli.offload import reader
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.offload.stream import LayerStream, read_tensors

LAYERS = 5
PIECE = 64 << 10  # several pieces per layer


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads, fds = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    # one of an earlier test's may have ended meanwhile
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.fixture
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(LAYERS):
        tensors[f"{layer}.norm"] = torch.randn(33, generator=generator)
        tensors[f"{layer}.proj"] = torch.randn(300, 257, generator=generator).to(torch.bfloat16)
        tensors[f"{layer}.ids"] = torch.arange(layer, layer + 9)
    return tensors


@pytest.fixture
def layers(tmp_path: Path, weights: dict[str, Tensor]) -> list[list[TensorRange]]:
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    return [
        [checkpoint[name] for name in weights if name.startswith(f"{layer}.")]
        for layer in range(LAYERS)
    ]


def passes(stream: LayerStream, weights: dict[str, Tensor], count: int) -> None:
    for _ in range(count):
        one_pass(stream, weights)


def one_pass(stream: LayerStream, weights: dict[str, Tensor]) -> None:
    for layer in range(LAYERS):
        with stream.layer(layer) as tensors:
            assert set(tensors) == {name for name in weights if name.startswith(f"{layer}.")}
            for name, tensor in tensors.items():
                assert tensor.dtype == weights[name].dtype
                assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("buffers", [2, 3, 9])
@pytest.mark.parametrize(
    "tiers", [["ssd"] * 5, ["ram"] * 5, ["ram", "ssd", "ssd", "ram", "ssd"], ["ssd"] + ["ram"] * 4]
)
def test_every_pass_hands_out_the_weights(
    layers: list[list[TensorRange]], weights: dict[str, Tensor], tiers: list[Tier], buffers: int
) -> None:
    with LayerStream(layers, tiers, buffers=buffers, piece_bytes=PIECE) as stream:
        for _ in range(4):
            one_pass(stream, weights)
        ssd_bytes = sum(
            tensor.n_bytes
            for layer, tier in zip(layers, tiers, strict=True)
            for tensor in layer
            if tier == "ssd"
        )
        assert stream.bytes_streamed == 4 * ssd_bytes
        assert stream.bytes_read >= stream.bytes_streamed
        assert (stream.read_s > 0) == (ssd_bytes > 0)


def test_reading_goes_on_between_passes(layers: list[list[TensorRange]]) -> None:
    with LayerStream(layers, ["ssd"] * LAYERS, buffers=3) as stream:
        for layer in range(LAYERS):
            with stream.layer(layer):
                pass
        target = stream.bytes_streamed + sum(t.n_bytes for layer in layers[:3] for t in layer)
        for _ in range(500):
            if stream.bytes_read >= target:
                break
            threading.Event().wait(0.01)
        assert stream.bytes_read >= target


def test_views_are_not_copies(layers: list[list[TensorRange]]) -> None:
    with LayerStream(layers, ["ssd"] * LAYERS) as stream, stream.layer(0) as tensors:
        addresses = {tensor.data_ptr() // (2 << 20) for tensor in tensors.values()}
        assert len(addresses) == 1  # all in one slot


def test_a_tensor_off_its_alignment_is_copied_right(tmp_path: Path) -> None:
    raw = torch.randn(100)
    header = b'{"t":{"dtype":"F32","shape":[100],"data_offsets":[0,400]}} '
    assert (8 + len(header)) % 4
    data = len(header).to_bytes(8, "little") + header + raw.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    place = read_checkpoint(tmp_path)["t"]
    assert torch.equal(read_tensors([place])["t"], raw)
    with LayerStream([[place]], ["ssd"]) as stream, stream.layer(0) as tensors:
        assert torch.equal(tensors["t"], raw)


def test_a_layer_split_over_two_shards(tmp_path: Path) -> None:
    first, second = torch.randn(1000), torch.randn(77, 3)
    save_file({"a": first}, tmp_path / "1.safetensors")
    save_file({"b": second}, tmp_path / "2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    layer = list(read_checkpoint(tmp_path).values())
    with LayerStream([layer], ["ssd"]) as stream:
        for _ in range(3):
            with stream.layer(0) as tensors:
                assert torch.equal(tensors["a"], first)
                assert torch.equal(tensors["b"], second)


def test_a_layer_without_tensors(layers: list[list[TensorRange]]) -> None:
    with LayerStream([[], layers[0], []], ["ssd", "ssd", "ram"]) as stream:
        for _ in range(3):
            for index, count in enumerate((0, 3, 0)):
                with stream.layer(index) as tensors:
                    assert len(tensors) == count


def test_resident_tensors_and_progress(layers: list[list[TensorRange]]) -> None:
    told: list[tuple[int, int]] = []
    total = sum(t.n_bytes for t in layers[0] + layers[1])
    with LayerStream(
        layers[:2], ["ram", "ram"], progress=lambda done, total: told.append((done, total))
    ):
        pass
    assert told[-1] == (total, total)
    assert all(a[0] <= b[0] for a, b in pairwise(told))


def test_several_threads_read_what_stays(
    layers: list[list[TensorRange]], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what fails in one of them is told as it would be of one."""
    expected = read_tensors(layers[0])
    pieces = reader.Layout.pieces
    monkeypatch.setattr(reader.Layout, "pieces", lambda layout: pieces(layout, 4096))
    meeting, calls = threading.Barrier(2), count()

    def together(*args: object) -> None:
        if next(calls) < 2:
            meeting.wait(timeout=20)  # an error where one thread comes alone

    disk.on_read = together
    found = read_tensors(layers[0])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    disk.on_read = disk.fail
    with pytest.raises(StreamError, match=r"reading .* failed"):
        read_tensors(layers[0])


def test_wrong_order_is_our_bug(layers: list[list[TensorRange]]) -> None:
    with LayerStream(layers, ["ssd"] * LAYERS) as stream:
        with pytest.raises(RuntimeError, match="layer 1 asked for, next is 0"), stream.layer(1):
            pass
        with (
            stream.layer(0),
            pytest.raises(RuntimeError, match="still in use"),
            stream.layer(1),
        ):
            pass
    with pytest.raises(RuntimeError, match="closed"), stream.layer(1):
        pass


@pytest.mark.parametrize("tiers", [["ssd"] * 5, ["ssd", "ram", "ssd", "ssd", "ram"]])
@pytest.mark.parametrize("layers_done", range(LAYERS + 1))
def test_restart_after_an_aborted_pass(
    layers: list[list[TensorRange]], weights: dict[str, Tensor], tiers: list[Tier], layers_done: int
) -> None:
    with LayerStream(layers, tiers, piece_bytes=PIECE) as stream:
        for layer in range(layers_done):
            with stream.layer(layer):
                pass
        stream.restart()
        one_pass(stream, weights)
        with pytest.raises(ZeroDivisionError), stream.layer(0):
            _ = 1 // 0
        stream.restart()
        one_pass(stream, weights)
        one_pass(stream, weights)


def test_a_read_error_surfaces_and_restart_recovers(
    layers: list[list[TensorRange]],
    weights: dict[str, Tensor],
    disk: Disk,
) -> None:
    broken = threading.Event()
    disk.on_read = lambda fd, targets, at: disk.fail() if broken.is_set() and at else None
    with LayerStream(layers, ["ssd"] * LAYERS, buffers=2, piece_bytes=PIECE) as stream:
        one_pass(stream, weights)
        broken.set()
        path = layers[0][0].path
        with pytest.raises(StreamError, match=f"reading {path} failed at byte \\d+: Input/output"):
            passes(stream, weights, 2)
        stream.restart()
        with pytest.raises(StreamError):  # and again, never a hang
            passes(stream, weights, 1)
        broken.clear()
        stream.restart()
        one_pass(stream, weights)


@pytest.mark.parametrize("change", ["truncate", "rewrite"])
def test_a_file_changed_while_streaming(
    layers: list[list[TensorRange]], weights: dict[str, Tensor], change: str
) -> None:
    path = layers[0][0].path
    with LayerStream(layers, ["ssd"] * LAYERS, buffers=2, piece_bytes=PIECE) as stream:
        one_pass(stream, weights)
        if change == "truncate":
            os.truncate(path, 300_000)
        else:
            path.write_bytes(path.read_bytes())
        with pytest.raises(StreamError, match=f"{path} (ends at byte|was changed while)"):
            passes(stream, weights, 3)


def test_where_a_cut_file_ends_now_is_told(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(20_000))
    file = reader.DirectFile(path, notice=lambda line: None)
    os.truncate(path, 9_000)
    with pytest.raises(StreamError, match="ends at byte 9000 but had 20000 bytes"):
        file.read_into(memoryview(mmap.mmap(-1, 20_480)), 0, 20_480)
    file.close()


def test_a_bug_in_the_reader_is_not_swallowed(layers: list[list[TensorRange]], disk: Disk) -> None:
    def bug(*args: object) -> None:
        raise TypeError("a bug")

    disk.on_read = bug
    with (
        LayerStream(layers, ["ssd"] * LAYERS) as stream,
        pytest.raises(RuntimeError, match="reader thread died") as caught,
        stream.layer(0),
    ):
        pass
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("where", ["open", "read"])
def test_refused_o_direct_falls_back_with_one_notice(
    layers: list[list[TensorRange]],
    weights: dict[str, Tensor],
    disk: Disk,
    where: str,
) -> None:
    disk.refuses_direct = where
    told: list[str] = []
    with LayerStream(layers, ["ssd"] * LAYERS, notice=told.append, piece_bytes=PIECE) as stream:
        one_pass(stream, weights)
        one_pass(stream, weights)
    told = [text for text in told if "huge pages" not in text]
    assert len(told) == 1
    assert "refuses O_DIRECT" in told[0]


def test_short_reads_are_continued(
    layers: list[list[TensorRange]], weights: dict[str, Tensor], disk: Disk
) -> None:
    def short(fd: int, targets: Sequence[memoryview], offset: int) -> int:
        read = disk.real_read(fd, [targets[0][: 4096 * 3]], offset)
        return read - 5 * (len(targets[0]) > 4096 * 3)

    disk.on_read = short
    with LayerStream(layers, ["ssd"] * LAYERS, piece_bytes=PIECE) as stream:
        one_pass(stream, weights)


@pytest.mark.parametrize("waiting_for", [0, 1, LAYERS - 1])
def test_ctrl_c_while_waiting_for_the_disk(
    layers: list[list[TensorRange]],
    weights: dict[str, Tensor],
    disk: Disk,
    waiting_for: int,
) -> None:
    go_on = threading.Event()
    end_of_layer = max(tensor.stop for tensor in layers[waiting_for])

    def late(fd: int, targets: Sequence[memoryview], offset: int) -> None:
        if offset + len(targets[0]) >= end_of_layer:
            go_on.wait()

    disk.on_read = late
    with LayerStream(layers, ["ssd"] * LAYERS, buffers=2) as stream:
        for layer in range(waiting_for):
            with stream.layer(layer):
                pass
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt), stream.layer(waiting_for):
            pass
        timer.join()
        go_on.set()
        stream.restart()
        passes(stream, weights, 2)


def test_a_missing_file(layers: list[list[TensorRange]]) -> None:
    layers[0][0].path.unlink()
    with pytest.raises(StreamError, match=r"cannot open .*model.safetensors: No such file"):
        LayerStream(layers, ["ssd"] * LAYERS)
    with pytest.raises(StreamError, match="cannot open"):
        read_tensors(layers[0])


def test_too_little_memory(layers: list[list[TensorRange]], computer: Computer) -> None:
    computer.has_free_ram(100_000)
    with pytest.raises(OutOfMemoryError, match=r"layers in RAM .* `offload='ssd'`"):
        LayerStream(layers, ["ram"] * LAYERS)
    with pytest.raises(OutOfMemoryError, match=r"resident weights: .* 99\.3 kB are free"):
        read_tensors(layers[0])


def test_a_hundred_sessions_do_not_grow_memory(layers: list[list[TensorRange]]) -> None:
    def pages() -> tuple[int, int]:
        total, resident_pages = Path("/proc/self/statm").read_text().split()[:2]
        return int(total) * 4096, int(resident_pages) * 4096

    def session(fail: bool) -> None:
        with LayerStream(layers, ["ram", "ssd", "ssd", "ssd", "ram"], buffers=2) as stream:
            for layer in range(LAYERS):
                with stream.layer(layer) as tensors:
                    tensors["x"] = next(iter(tensors.values())) + 1
                    if fail and layer == 2:
                        raise KeyboardInterrupt

    for cycle in range(120):
        if cycle == 20:
            before = pages()
        if cycle % 2:
            with pytest.raises(KeyboardInterrupt):
                session(fail=True)
        else:
            session(fail=False)
    after = pages()
    one_session = 4 * (2 << 20)  # two slots, two resident layers
    assert after[0] - before[0] < 5 * one_session
    assert after[1] - before[1] < 5 * one_session
