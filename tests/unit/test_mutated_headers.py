"""A thousand damaged headers of each container: read, or refused in one line; nothing else.

What is read is read to the last byte: of every header that passes, all tensors.
"""

import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from mutants import mutated
from safetensors.torch import save_file

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.container import read_gguf
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.gguf_checkpoint import read_gguf_checkpoint
from specexec_cli.offload.resident import read_tensors
from specexec_cli.offload.store import read_checkpoint, read_header

MUTANTS = 1000
HANGS_S = 60.0  # far more than a tiny file takes on any machine


def tiny_gguf(path: Path) -> bytes:
    """A Llama of one layer, with metadata of every kind."""
    writer = GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64), (writer.add_embedding_length, 32),
        (writer.add_block_count, 1), (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 10000.0),
    ):  # fmt: skip
        add(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{index}>" for index in range(8)])
    writer.add_token_types([1] * 8)
    writer.add_token_scores([0.5] * 8)
    writer.add_add_bos_token(True)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    for name in ("attn_q", "attn_k", "ffn_up"):
        blocks = np.zeros((32, 18), np.uint8)
        kind = GGMLQuantizationType.Q4_0
        writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def tiny_safetensors(path: Path) -> bytes:
    tensors = {f"model.layers.{i}.weight": torch.zeros(4, 4 + i) for i in range(6)}
    save_file({**tensors, "b": torch.zeros(3, dtype=torch.bfloat16)}, path)
    return path.read_bytes()


def read_whole_gguf(path: Path) -> list[TensorRange]:
    """Container, config and names: all that happens before a byte of a weight is read."""
    return list(read_gguf_checkpoint(path).tensors.values())


def read_safetensors(path: Path) -> list[TensorRange]:
    return list(read_header(path).values())


@contextmanager
def ended() -> Iterator[None]:
    """Fails what does not come to an end, where the system has a timer for it."""

    def give_up(number: int, frame: object) -> None:
        raise AssertionError(f"not ended after {HANGS_S:.0f} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, HANGS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("write", "read"), [(tiny_gguf, read_whole_gguf), (tiny_safetensors, read_safetensors)]
)
def test_damaged_headers_are_read_within_the_file_or_refused_in_a_line(
    tmp_path: Path,
    write: Callable[[Path], bytes],
    read: Callable[[Path], list[TensorRange]],
) -> None:
    raw = write(tmp_path / "whole.gguf")
    places = read(tmp_path / "whole.gguf")  # it is right before it is damaged
    header_bytes = min(each.start for each in places)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for seed in range(MUTANTS):
        data = mutated(raw, header_bytes, random.Random(seed))
        path.write_bytes(data)
        with ended():
            try:
                found, message = read(path), ""
            except CheckpointError as error:
                found, message = [], str(error)
            refused += bool(message)
            assert "\n" not in message, seed
            assert len(message) < 1000, seed
            assert all(0 <= each.start <= each.stop <= len(data) for each in found), seed
            stored = read_tensors(found) if found else {}
        assert {name: tensor.nbytes for name, tensor in stored.items()} == {
            each.name: each.n_bytes for each in found
        }, seed
    assert MUTANTS // 2 < refused < MUTANTS  # else the damages are none, or nothing is left to read


def test_damaged_indices_are_read_or_refused_in_a_line(tmp_path: Path) -> None:
    """The index of a checkpoint in several files is a header too: names of files, in JSON."""
    folder = tmp_path / "whole"
    folder.mkdir()
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    for part, name in enumerate(names):
        save_file({f"model.layers.{part}.weight": torch.zeros(4, 4)}, folder / name)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    index = folder / "model.safetensors.index.json"
    whole = {f"model.layers.{part}.weight": name for part, name in enumerate(names)}
    raw = json.dumps({"metadata": {"total_size": 128}, "weight_map": whole}).encode()
    index.write_bytes(raw)
    assert set(read_checkpoint(folder).tensors) == set(whole)
    refused = 0
    for seed in range(MUTANTS):
        index.write_bytes(mutated(raw, len(raw), random.Random(seed)))
        with ended():
            try:
                found, message = list(read_checkpoint(folder).tensors.values()), ""
            except CheckpointError as error:
                found, message = [], str(error)
        refused += bool(message)
        assert "\n" not in message, seed
        assert all(each.path.parent == folder for each in found), seed
    assert refused > MUTANTS // 2


def test_the_whole_gguf_file_is_what_was_written(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "a.gguf")
    found = read_gguf(tmp_path / "a.gguf")
    assert found.metadata["tokenizer.ggml.tokens"] == [f"<{index}>" for index in range(8)]
    assert found.metadata["tokenizer.ggml.add_bos_token"] is True
    assert found.tensors["blk.0.ffn_up.weight"].shape == (32, 32)
