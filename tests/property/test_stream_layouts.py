"""Whatever the order, gaps, shards, tiers, slots, aborts: the bytes handed out are the file's."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specexec_cli.errors import CheckpointError
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.store import read_checkpoint, read_header
from specexec_cli.offload.stream import LayerStream

SIZES = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}


@st.composite
def shards(draw: st.DrawFn) -> list[list[tuple[str, str, int, int]]]:
    """Files, each a list of (tensor, dtype, items, gap in bytes before it)."""
    layers = draw(st.integers(1, 4))
    names = draw(st.permutations([f"{i}.{n}" for i in range(layers) for n in "abc"]))
    files: list[list[tuple[str, str, int, int]]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for name in names:
        items = draw(st.integers(0, 30) | st.integers(500, 40_000))
        gap = draw(st.sampled_from([0, 0, 0, 1, 4096, 300_000]))
        file = files[draw(st.integers(0, len(files) - 1))]
        file.append((name, draw(st.sampled_from(sorted(SIZES))), items, gap))
    return [file for file in files if file]


def write(folder: Path, files: list[list[tuple[str, str, int, int]]]) -> Checkpoint:
    generator = torch.Generator().manual_seed(1)
    weight_map = {}
    for number, file in enumerate(files):
        header, data = {}, b""
        for name, dtype, items, gap in file:
            n_bytes = items * SIZES[dtype]
            data += bytes(gap)
            offsets = [len(data), len(data) + n_bytes]
            header[name] = {"dtype": dtype, "shape": [items], "data_offsets": offsets}
            random = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=generator)
            data += random.numpy().tobytes()
            weight_map[name] = f"{number}.safetensors"
        raw = json.dumps(header).encode()
        (folder / f"{number}.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return read_checkpoint(folder)


@settings(max_examples=60, deadline=None)
@given(files=shards(), data=st.data())
def test_streamed_bytes_are_the_files_bytes(
    files: list[list[tuple[str, str, int, int]]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        checkpoint = write(Path(name), files)
        count = 1 + max(int(tensor.split(".")[0]) for tensor in checkpoint)
        layers = [[t for t in checkpoint.values() if t.name[0] == str(i)] for i in range(count)]
        raw = {place.path: place.path.read_bytes() for place in checkpoint.values()}
        tiers = [data.draw(st.sampled_from(["ssd", "ssd", "ram"])) for _ in layers]
        buffers = data.draw(st.integers(2, 4))
        piece_bytes = data.draw(st.sampled_from([4096, 65536, 1 << 20]))
        passes = data.draw(st.lists(st.integers(1, count), min_size=1, max_size=5))
        with LayerStream(layers, tiers, buffers=buffers, piece_bytes=piece_bytes) as stream:
            for length in passes:  # aborted ones too
                for layer in range(length):
                    with stream.layer(layer) as tensors:
                        for key, tensor in tensors.items():
                            place = checkpoint[key]
                            got = tensor.view(torch.uint8).numpy().tobytes()
                            assert got == raw[place.path][place.start : place.stop]
                stream.restart()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_a_checkpoint_error_or_still_right(data: st.DataObject) -> None:
    header = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    raw = json.dumps(header).encode()
    content = bytearray(len(raw).to_bytes(8, "little") + raw + bytes(32))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    kept = data.draw(st.integers(0, len(content)))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.safetensors"
        path.write_bytes(content[:kept])
        try:
            tensors = read_header(path)
        except CheckpointError:
            return
        for tensor in tensors.values():
            assert 8 <= tensor.start <= tensor.stop <= kept
