import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specexec_cli.errors import CheckpointError
from specexec_cli.offload.store import read_checkpoint, read_header


def write_raw(path: Path, header: object, data_bytes: int, header_bytes: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(raw) if header_bytes is None else header_bytes
    path.write_bytes(struct.pack("<Q", length) + raw + bytes(data_bytes))
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    shape = list(shape) if isinstance(shape, tuple) else shape
    offsets = list(offsets) if isinstance(offsets, tuple) else offsets
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("name", ["model.safetensors", "gptq_model-4bit-128g.safetensors"])
def test_ranges_are_the_bytes_of_the_tensors(tmp_path: Path, name: str) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / name, metadata={"format": "pt"})
    checkpoint = read_checkpoint(tmp_path)
    raw = (tmp_path / name).read_bytes()
    assert set(checkpoint) == set(tensors)
    assert checkpoint.total_bytes == 3 * 5 * 4 + 7 * 2 + 8
    for key, tensor in tensors.items():
        place = checkpoint[key]
        assert place.shape == tuple(tensor.shape)
        expected = tensor.flatten().view(torch.uint8) if tensor.numel() else torch.zeros(0)
        assert raw[place.start : place.stop] == bytes(expected.tolist())
    assert checkpoint["b"].dtype == "BF16"


def test_index_finds_tensors_in_their_shards(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "m-1.safetensors")
    save_file({"y": torch.ones(3), "extra": torch.ones(1)}, tmp_path / "m-2.safetensors")
    index = {"metadata": {}, "weight_map": {"x": "m-1.safetensors", "y": "m-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = read_checkpoint(tmp_path)
    assert {name: place.path.name for name, place in checkpoint.items()} == index["weight_map"]
    assert checkpoint.folder == tmp_path


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            {"x": "gone.safetensors"},
            "no shard .*gone.safetensors, named by model.safetensors.index",
        ),
        ({"z": "m-1.safetensors"}, "has no tensor 'z', which model.safetensors.index.json says"),
        ({"x": "../m-1.safetensors"}, "not the name of a file beside the index"),
        ({"x": 3}, "not the name of a file beside the index"),
        ({"x": "y" * 300}, "no shard .*: download it again"),
        ({}, "has no 'weight_map'"),
        (None, "has no 'weight_map'"),
    ],
)
def test_bad_index(tmp_path: Path, weight_map: object, message: str) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "m-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path)


def test_index_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json: its JSON cannot be read"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "download the weights first"),
        (["model.bin"], r"model.bin but no \*.safetensors. Only safetensors"),
        (["pytorch_model.bin"], "pytorch_model.bin is no file of tensors alone"),
        (["consolidated.00.pth"], "Only safetensors and GGUF are read, .*save_pretrained"),
        (["a.safetensors", "b.safetensors"], "holds 2 weights files .*download the index"),
        (["a.safetensors.index.json", "b.safetensors.index.json"], "holds 2 index files"),
    ],
)
def test_folder_without_usable_weights(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path)


def test_missing_folder_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no folder .*gone"):
        read_checkpoint(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"no file .*gone.safetensors"):
        read_header(tmp_path / "gone.safetensors")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"t": entry(dtype="F4")}, "'t' has dtype 'F4'; known are"),
        ({"t": entry(dtype=None)}, "dtype None"),
        ({"t": entry(shape=(2, -1))}, "not a list of sizes"),
        ({"t": entry(shape=(2.0,))}, "not a list of sizes"),
        ({"t": entry(shape=[True, 2])}, "not a list of sizes"),
        ({"t": entry(shape=None)}, "not a list of sizes"),
        ({"t": entry(shape=[10**30] * 200)}, "not a list of sizes"),
        ({"t": entry(shape=[1] * 100_000)}, "not a list of sizes"),
        ({"t": entry(offsets=(0,))}, r"not \[begin, end\]"),
        ({"t": entry(offsets=(8, 0))}, r"not \[begin, end\]"),
        ({"t": entry(offsets="08")}, r"not \[begin, end\]"),
        ({"t": entry(offsets=(-8, 0))}, r"not \[begin, end\]"),
        ({"t": entry(offsets=(0, 1 << 70))}, "the download is truncated"),
        ({"t": entry(offsets=(16, 24))}, "ends at byte .* but the file has only"),
        ({"t": entry(offsets=(0, 4))}, r"holds 4 bytes but its shape \[2\] in F32 takes 8"),
        ({"t": entry(), "u": entry(offsets=(4, 12))}, "'t' and 'u' overlap"),
        ({"t": 3}, "has no dtype, shape and offsets"),
        ([], "its JSON is not an object"),
        (b"{", "its JSON cannot be read"),
        (b"\xff\xfe{}", "its JSON cannot be read"),
        (b'{"t": {}, "t": {}}', "a name appears twice"),
        (b"[" * 100_000, "its JSON cannot be read"),
    ],
)
def test_header_that_lies(tmp_path: Path, header: object, message: str) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, data_bytes=16)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("header_bytes", [1000, 1 << 40, (1 << 64) - 1])
def test_header_longer_than_the_file(tmp_path: Path, header_bytes: int) -> None:
    path = write_raw(tmp_path / "model.safetensors", {"t": entry()}, 8, header_bytes)
    with pytest.raises(CheckpointError, match=f"a header of {header_bytes} bytes is impossible"):
        read_header(path)


def test_file_of_a_few_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="has only 3 bytes: the download is truncated"):
        read_header(path)
