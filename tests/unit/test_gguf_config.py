"""What config.json would say of a GGUF file, beside transformers' own table of the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from transformers import CONFIG_MAPPING
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.config import MODEL_TYPES, gguf_config
from specexec_cli.gguf.container import read_gguf

# each value tells which key it is of
VALUES: dict[str, Any] = {
    "context_length": 640, "block_count": 3, "feed_forward_length": 96, "embedding_length": 64,
    "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 16,
    "attention.value_length": 16, "rope.dimension_count": 16, "rope.freq_base": 12345.0,
    "attention.layer_norm_rms_epsilon": 0.25, "attention.sliding_window": 128, "vocab_size": 40,
    "expert_feed_forward_length": 24,
}  # fmt: skip
_EXPERTS = {"expert_count": 4, "expert_used_count": 3}


def write(
    path: Path,
    architecture: str,
    values: dict[str, Any],
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    writer = GGUFWriter(path, architecture)
    for key, value in values.items():
        name = f"{architecture}.{key}"
        if isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    for name, tensor in {
        "token_embd.weight": np.zeros((40, 64), np.float32),
        **(tensors or {}),
    }.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_it_says_what_transformers_table_says(tmp_path: Path, architecture: str) -> None:
    values = {**VALUES, **(_EXPERTS if architecture.endswith("moe") else {})}
    config = gguf_config(read_gguf(write(tmp_path / "m.gguf", architecture, values)))
    table = GGUF_CONFIG_MAPPING.get(architecture) or GGUF_CONFIG_MAPPING[MODEL_TYPES[architecture]]
    said = {name: values[key] for key, name in table.items() if name and key in values}
    theta = said.pop("rope_theta")
    rope = config["rope_parameters"]
    assert rope.get("full_attention", rope)["rope_theta"] == theta
    assert {name: config[name] for name in said} == said
    made = CONFIG_MAPPING[config["model_type"]].from_dict(config)  # transformers takes all of it
    assert made.head_dim == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_count": None}, "its metadata has no 'llama.block_count'"),
        ({"embedding_length": 2**31}, "says 2147483648 as 'llama.embedding_length'"),
        ({"attention.head_count": 0}, "0 attention heads"),
        ({"attention.head_count_kv": [2, 4]}, r"says \[2, 4\] as 'llama.attention.head_count_kv'"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "says nan as"),
        ({"rope.freq_base": 0.0}, "gives no frequencies"),
        ({"rope.scaling.type": "spiral", "rope.scaling.factor": 2.0}, "'spiral' are not supported"),
    ],
)
def test_absurd_values_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    values = {key: value for key, value in {**VALUES, **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        gguf_config(read_gguf(write(tmp_path / "m.gguf", "llama", values)))


def test_architectures_that_are_not_known_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"architecture 'mamba' are not supported; .* llama"):
        gguf_config(read_gguf(write(tmp_path / "m.gguf", "mamba", VALUES)))


def test_factors_of_frequencies_must_be_factors(tmp_path: Path) -> None:
    for factors in (np.array([1.0, 0.0], np.float32), np.array([1.0], np.float16)):
        path = write(tmp_path / "m.gguf", "llama", VALUES, {"rope_freqs.weight": factors})
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
            gguf_config(read_gguf(path))


def test_the_large_gemmas_scale_queries_by_another_size(tmp_path: Path) -> None:
    """As llama.cpp has it: of the 27B models the number of layers tells."""
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        for count, scale in ((layers, 8), (layers - 1, 16)):
            values = {**VALUES, "block_count": count}
            found = gguf_config(read_gguf(write(tmp_path / "m.gguf", architecture, values)))
            assert found["query_pre_attn_scalar"] == scale
