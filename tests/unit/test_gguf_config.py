"""What config.json would say of a GGUF file, beside transformers' own table of the same."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.architectures import ARCHITECTURES
from specexec_cli.gguf.config import gguf_config
from specexec_cli.gguf.container import read_gguf
from specexec_cli.gguf.names import translate

# each value tells which key it is of
VALUES: dict[str, Any] = {
    "context_length": 640, "block_count": 3, "feed_forward_length": 96, "embedding_length": 64,
    "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 16,
    "attention.value_length": 16, "rope.dimension_count": 16, "rope.freq_base": 12345.0,
    "attention.layer_norm_rms_epsilon": 0.25, "attention.sliding_window": 128, "vocab_size": 40,
    "expert_feed_forward_length": 24,
}  # fmt: skip
_EXPERTS = {"expert_count": 4, "expert_used_count": 3}
_STACK = {"blk.0.ffn_gate_exps.weight": np.zeros((4, 2, 2), np.float32)}


# architectures of which transformers has a table, too
OF_TRANSFORMERS = (
    "llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt-oss",
)  # fmt: skip


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
    layers = min(values.get("block_count", 0), 100)
    for name, tensor in {
        "token_embd.weight": np.zeros((40, 64), np.float32),
        **{f"blk.{layer}.attn_norm.weight": np.ones(64, np.float32) for layer in range(layers)},
        **(tensors or {}),
    }.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", OF_TRANSFORMERS)
def test_it_says_what_transformers_table_says(tmp_path: Path, architecture: str) -> None:
    mixture = architecture.endswith("moe") or architecture == "gpt-oss"
    values = {**VALUES, **(_EXPERTS if mixture else {})}
    if architecture == "gpt-oss":  # its converter writes one size under both names
        values["expert_feed_forward_length"] = values["feed_forward_length"]
    tensors = _STACK if mixture else {}
    config = gguf_config(read_gguf(write(tmp_path / "m.gguf", architecture, values, tensors)))
    table = (
        GGUF_CONFIG_MAPPING.get(architecture)
        or GGUF_CONFIG_MAPPING[ARCHITECTURES[architecture].model_type]
    )
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
        ({"rope.dimension_count": 8}, "turns 8 of the 16 numbers of a head .* for llama"),
        ({"block_count": 4000}, "says 4000 layers, the file has tensors of 100 layers"),
        ({"expert_count": 2**30, "expert_used_count": 1}, "1073741824 experts, .* of 0 experts"),
    ],
)
def test_absurd_values_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    values = {key: value for key, value in {**VALUES, **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        gguf_config(read_gguf(write(tmp_path / "m.gguf", "llama", values)))


def test_an_index_that_picks_nothing_is_refused(tmp_path: Path) -> None:
    values = {**VALUES, **_EXPERTS, "attention.indexer.top_k": 0}
    with pytest.raises(CheckpointError, match="its index picks 0 tokens"):
        gguf_config(read_gguf(write(tmp_path / "m.gguf", "glm-dsa", values, _STACK)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention.rope_pattern": [True]}, "do not say of each of 2 layers how it turns"),
        ({"attention.sliding_window_pattern": [True]}, "of 2 layers whether it has a window"),
        ({"expert_count": 4, "expert_used_count": 2}, "4 experts, the file has tensors of 0"),
    ],
)
def test_what_granite_with_windows_does_not_say(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    values = {**VALUES, "block_count": 2, "attention.sliding_window": 8, **change}
    with pytest.raises(CheckpointError, match=message):
        gguf_config(read_gguf(write(tmp_path / "m.gguf", "granite_swa", values)))


@pytest.mark.parametrize("architecture", ["granite", "granitemoe", "granitehybrid", "granite_swa"])
@pytest.mark.parametrize("said", [{}, {"attention.scale": 0.0}, {"attention.scale": 0.5}])
def test_granite_scales_scores_as_llama_cpp_where_a_file_does_not_say_how(
    tmp_path: Path, architecture: str, said: dict[str, float]
) -> None:
    """By the size of its heads, where transformers' config class would not scale them at all."""
    values = {
        **VALUES, "block_count": 2, "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 1,
        "ssm.time_step_rank": 4, "ssm.inner_size": 128, "attention.head_count_kv": 2, **said,
    }  # fmt: skip
    experts = {**_EXPERTS, "expert_count": 4} if architecture == "granitemoe" else {}
    file = write(
        tmp_path / "m.gguf", architecture, {**values, **experts}, _STACK if experts else None
    )
    config = gguf_config(read_gguf(file))
    assert config["attention_multiplier"] == (said.get("attention.scale") or 16**-0.5)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("gptj", r"\. docs/using\.md lists those that are"),
        ("bitnet", ": .* squares a ReLU.* safetensors"),
        ("chameleon", ": .* norm of one head .* safetensors"),
        ("glm5-next", ": .* hyper-connections.* safetensors"),
        ("hy_v4", ": .* hyper-connections.* safetensors"),
    ],
)
def test_architectures_that_are_not_read_are_named(
    tmp_path: Path, architecture: str, reason: str
) -> None:
    path = write(tmp_path / "m.gguf", architecture, VALUES)
    with pytest.raises(CheckpointError, match=f"'{architecture}' are not supported{reason}"):
        gguf_config(read_gguf(path))


_GROWING = {**VALUES, "attention.temperature_scale": 0.5}


@pytest.mark.parametrize(
    ("scaling", "steps"),
    [
        ("none", {}),
        ("linear", {}),
        ("none", {"rope.scaling.original_context_length": 16}),
        ("linear", {"rope.scaling.original_context_length": 16}),
        ("yarn", {"rope.scaling.original_context_length": 16}),
    ],
)
def test_queries_grow_with_positions_however_frequencies_are_scaled(
    tmp_path: Path, scaling: str, steps: dict[str, Any]
) -> None:
    """By steps of the original context, or of the whole one, as in llama.cpp."""
    values = {**_GROWING, "rope.scaling.type": scaling, "rope.scaling.factor": 2.0, **steps}
    config = gguf_config(read_gguf(write(tmp_path / "m.gguf", "mistral3", values)))
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING["ministral3"].from_dict(config))
    step = steps.get("rope.scaling.original_context_length", values["context_length"])
    assert made.config.rope_parameters["original_max_position_embeddings"] == step
    with torch.inference_mode():
        assert made(torch.arange(20)[None]).logits.isfinite().all()


def test_queries_that_grow_by_steps_of_nothing_are_refused(tmp_path: Path) -> None:
    values = {**_GROWING, "rope.scaling.original_context_length": 0}
    with pytest.raises(CheckpointError, match="by steps of 0 positions"):
        gguf_config(read_gguf(write(tmp_path / "m.gguf", "mistral3", values)))


def test_factors_of_frequencies_must_be_factors(tmp_path: Path) -> None:
    for factors in (np.array([1.0, 0.0], np.float32), np.array([1.0], np.float16)):
        path = write(tmp_path / "m.gguf", "llama", VALUES, {"rope_freqs.weight": factors})
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
            gguf_config(read_gguf(path))


def _of_step(path: Path, **values: Any) -> Path:
    """A file of Step with two rotary factors, for heads of which 8 numbers turn in a window."""
    said = {
        **VALUES, **_EXPERTS, "expert_shared_feed_forward_length": 24, "expert_weights_scale": 3.0,
        "rope.dimension_count": 8, "attention.sliding_window_pattern": [True, True, False],
        **{name.replace("__", "."): value for name, value in values.items()},
    }  # fmt: skip
    factors = {"rope_freqs.weight": np.array([1.0, 3.0], np.float32)}
    return write(path, "step35", said, {**_STACK, **factors})


def test_step_has_as_many_factors_as_frequencies_where_it_sees_all(tmp_path: Path) -> None:
    """One for each four numbers of a head that turn in a window: without one there are none."""
    config = gguf_config(read_gguf(_of_step(tmp_path / "m.gguf")))["text_config"]
    assert config["rope_parameters"]["full_attention"]["long_factor"] == [1.0, 3.0]
    for turned in (0, 3, 16):
        path = _of_step(tmp_path / "m.gguf", rope__dimension_count=turned)
        with pytest.raises(CheckpointError, match=f"heads of which {turned} numbers turn"):
            gguf_config(read_gguf(path))


def test_layers_of_a_kind_have_as_many_heads(tmp_path: Path) -> None:
    path = _of_step(tmp_path / "m.gguf", attention__head_count=[6, 4, 8])
    message = r"\[6, 4, 8\] as 'step35\.attention\.head_count', of layers .* of the same kind"
    with pytest.raises(CheckpointError, match=message):
        gguf_config(read_gguf(path))
    values = {**VALUES, **_EXPERTS, "attention.head_count_kv": [2, 4, 2],
              "attention.sliding_window_pattern": [True, True, False]}  # fmt: skip
    path = write(tmp_path / "m.gguf", "mimo2", values, _STACK)
    with pytest.raises(CheckpointError, match=r"\[2, 4, 2\] as 'mimo2\.attention\.head_count_kv'"):
        gguf_config(read_gguf(path))


def test_the_large_gemmas_scale_queries_by_another_size(tmp_path: Path) -> None:
    """As llama.cpp has it: of the 27B models the number of layers tells."""
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        for count, scale in ((layers, 8), (layers - 1, 16)):
            values = {**VALUES, "block_count": count}
            found = gguf_config(read_gguf(write(tmp_path / "m.gguf", architecture, values)))
            assert found["query_pre_attn_scalar"] == scale


def test_gpt_oss_keeps_what_its_own_config_has(tmp_path: Path) -> None:
    """A ramp of YaRN that is not rounded, a window in every other layer, and ends of texts that
    are not those of messages."""
    words = ["<|return|>", "<|end|>", "<|call|>", "x"]
    yarn = {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }  # fmt: skip
    path = write(tmp_path / "m.gguf", "gpt-oss", {**VALUES, **_EXPERTS, **yarn}, _STACK)
    file = read_gguf(path)
    named = {"tokenizer.ggml.tokens": words, "tokenizer.ggml.eos_token_id": 0}
    config = gguf_config(replace(file, metadata={**file.metadata, **named}))
    assert config["eos_token_id"] == [0, 2]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert (config["layer_types"], config["sliding_window"]) == (kinds, 128)
    assert config["rope_parameters"]["truncate"] is False
    other = {**VALUES, **_EXPERTS, "rope.freq_base_swa": 7.0}
    with pytest.raises(CheckpointError, match="a rotary base of their own"):
        gguf_config(read_gguf(write(tmp_path / "m.gguf", "gpt-oss", other, _STACK)))


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (["x", "<eos>", "<turn|>", "<|tool_response>", "</s>"], [4, 1, 2, 3]),  # Gemma 4
        (["<|calls|>", "<|flush|>", "<|end|>", "x", "</s>"], [4, 0, 1]),  # Solar Open
        (["<|end|>", "[EOS]", "[EOT]", "x", "</s>"], [4, 0, 2, 1]),  # Kimi-K2
        (["x", "[e~[", "y", "z", "</s>"], [4, 1]),  # MiniMax-M2
        (["</s>", "x", "y", "z", "<unk>"], 4),  # plain text to many vocabularies
    ],
)
def test_tokens_that_end_a_reply_are_told_by_their_spelling(
    words: list[str], ends: list[int] | int, tmp_path: Path
) -> None:
    """Most files name one token, and a reply may end with any of several."""
    file = read_gguf(write(tmp_path / "m.gguf", "llama", VALUES))
    named = {"tokenizer.ggml.tokens": words, "tokenizer.ggml.eos_token_id": 4}
    found = gguf_config(replace(file, metadata={**file.metadata, **named}))
    assert found["eos_token_id"] == ends


def test_counts_are_those_of_the_tensors(tmp_path: Path) -> None:
    norm = np.ones(64, np.float32)
    cases: list[tuple[str, dict[str, np.ndarray], str]] = [
        ("llama", {"blk.3.attn_norm.weight": norm}, "says 3 layers, the file has tensors of 4"),
        ("llama", {"blk.9.attn_norm.weight": norm}, "says 3 layers, the file lacks some"),
        ("qwen3moe", {"blk.0.ffn_up_exps.weight": np.zeros((5, 2, 2), np.float32)}, "4 experts"),
        ("qwen3moe", {"blk.0.ffn_up_exps.weight": np.zeros((4, 0, 2), np.float32)}, "4 experts"),
        ("llama", {f"blk.0.ffn_up.{n}.weight": norm for n in (0, 1, 2, 4)}, "lacks some"),
    ]
    for architecture, tensors, message in cases:
        experts = _EXPERTS if "ffn_up" in str(tensors.keys()) else {}
        path = write(tmp_path / "m.gguf", architecture, {**VALUES, **experts}, tensors)
        with pytest.raises(CheckpointError, match=message):
            gguf_config(read_gguf(path))
    old = {f"blk.0.ffn_up.{n}.weight": norm for n in range(4)}
    path = write(tmp_path / "m.gguf", "llama", {**VALUES, **_EXPERTS}, old)
    assert gguf_config(read_gguf(path))["num_local_experts"] == 4


def test_factors_for_long_texts_need_those_for_short_ones(tmp_path: Path) -> None:
    for which in ("long", "short"):
        factors = {f"rope_factors_{which}.weight": np.ones(8, np.float32)}
        path = write(tmp_path / "m.gguf", "phi3", VALUES, factors)
        with pytest.raises(CheckpointError, match="long and short texts it has but one"):
            gguf_config(read_gguf(path))


@pytest.mark.parametrize(("factor", "own"), [(4.0, 0.1 * math.log(4) + 1), (0.5, 1.0)])
def test_yarn_scales_attention_as_the_file_says(tmp_path: Path, factor: float, own: float) -> None:
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": factor,
               "rope.scaling.original_context_length": 64}  # fmt: skip
    for told, expected in (
        ({}, own),
        ({"attn_factor": 0.5}, own * 0.5),
        ({"yarn_attn_factor": 0.25}, 0.25),  # the config's attention_factor, in YaRN's own place
    ):
        values = {f"rope.scaling.{key}": value for key, value in told.items()}
        path = write(tmp_path / "m.gguf", "llama", {**VALUES, **scaling, **values})
        config = LlamaConfig.from_dict(gguf_config(read_gguf(path)))
        _, found = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    "names",
    [
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.ffn_gate.0.weight", "blk.0.ffn_gate_exps.weight"),
    ],
)
def test_two_tensors_of_one_name_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    experts = _EXPERTS if "ffn" in names[0] else {}
    tensors = {name: np.zeros((4, 2, 2), np.float32) for name in names}
    file = read_gguf(write(tmp_path / "m.gguf", "llama", {**VALUES, **experts}, tensors))
    with pytest.raises(CheckpointError, match=f"'{names[0]}' and '{names[1]}' are both 'model"):
        translate(file, gguf_config(file))
