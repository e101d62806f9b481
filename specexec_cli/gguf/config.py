"""Makes transformers' config of a GGUF file from its metadata. Imports no torch: `plan` uses it.

transformers' own table for this (integrations/ggml.py) leaves out values that change results:
scaled rotary frequencies, windows, soft caps, the width of experts. A test compares both tables
where they overlap. Values that no file has (Gemma's scale of queries) are as in llama.cpp's
src/models; the metadata's keys are listed in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.container import GgufFile, shown
from specexec_cli.gguf.counts import expert_count, layer_count
from specexec_cli.gguf.metadata import Metadata
from specexec_cli.gguf.rotary import rotary_parameters

Config = dict[str, Any]

# llama.cpp's name of an architecture -> transformers' model_type
MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2", "gemma3": "gemma3_text", "phi3": "phi3", "gpt-oss": "gpt_oss",
}  # fmt: skip
_WHOLE = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>",
    "<end_of_turn>", "<|return|>", "<|call|>",
)  # fmt: skip


def gguf_config(file: GgufFile) -> Config:
    """transformers' config of the model in a GGUF file, as config.json would hold it.

    Raises:
        CheckpointError: the architecture is not known, or a value is missing or absurd.
    """
    metadata = Metadata(file)
    architecture = metadata.architecture
    if not isinstance(architecture, str) or architecture not in MODEL_TYPES:
        raise CheckpointError(
            f"{file.path}: GGUF files of architecture {shown(architecture)} are not supported; "
            f"supported are {', '.join(MODEL_TYPES)}. Use the model's safetensors files"
        )
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise metadata.refusal("it has no table of embeddings 'token_embd.weight'")
    config: Config = {"model_type": MODEL_TYPES[architecture]}
    config |= {name: metadata.whole(key) for key, name in _WHOLE.items()}
    if not config["num_attention_heads"]:
        raise metadata.refusal("a model of 0 attention heads has no text")
    _check_count(metadata, "layers", config["num_hidden_layers"], layer_count(file))
    config |= {
        "num_key_value_heads": metadata.whole(
            "attention.head_count_kv", config["num_attention_heads"]
        ),
        "head_dim": metadata.whole(
            "attention.key_length", config["hidden_size"] // config["num_attention_heads"]
        ),
        "intermediate_size": metadata.whole("feed_forward_length", 0),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": rotary_parameters(file, metadata, config),
        "bos_token_id": metadata.token("bos_token_id"),
        "eos_token_id": _ends(metadata),
        "pad_token_id": metadata.token("padding_token_id"),
        "dtype": _dtype(file),
    }
    rotary = metadata.whole("rope.dimension_count", config["head_dim"])
    if architecture != "phi3" and rotary != config["head_dim"]:
        raise metadata.refusal(
            f"it turns {rotary} of the {config['head_dim']} numbers of a head by its position, "
            f"which is not supported for {architecture}"
        )
    own = _OWN.get(architecture)
    return config if own is None else config | own(file, metadata, config)


def _check_count(metadata: Metadata, what: str, said: int, found: int | None) -> None:
    """Refuses a count that the tensors contradict: memory will be allocated for that count."""
    if said != found:
        has = "lacks some of its" if found is None else f"has tensors of {found}"
        raise metadata.refusal(f"its metadata says {said} {what}, the file {has} {what}")


def _experts(file: GgufFile, metadata: Metadata) -> int:
    """The number of experts of a layer, checked against the tensors."""
    count = metadata.whole("expert_count")
    _check_count(metadata, "experts", count, expert_count(file))
    return count


def _ends(metadata: Metadata) -> list[int] | int | None:
    """The tokens that end a text: those that the file names, and those with a known spelling.

    Many files name only one, so llama.cpp goes by the spelling as well (src/llama-vocab.cpp).
    """
    found = [metadata.token("eos_token_id"), metadata.token("eot_token_id")]
    spelled = metadata.words()
    ends = [word for word in _ENDS if word in spelled]
    # in gpt-oss <|end|> ends only one of a reply's messages
    if {"<|return|>", "<|call|>"} <= {*ends}:
        ends = [word for word in ends if word != "<|end|>"]
    found += [spelled[word] for word in ends]
    ids = list(dict.fromkeys(each for each in found if each is not None))
    return ids if len(ids) > 1 else next(iter(ids), None)


def _dtype(file: GgufFile) -> str:
    """The dtype to compute in on a GPU: that of most bytes, or bfloat16 if they are packed."""
    found: dict[str, int] = {}
    for tensor in file.tensors.values():
        found[tensor.type.name] = found.get(tensor.type.name, 0) + tensor.stop - tensor.start
    most = max(found, key=lambda name: found[name], default="BF16")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _llama(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    own: Config = {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    if metadata.whole("expert_count", 0):
        own = {
            "model_type": "mixtral",
            "num_local_experts": _experts(file, metadata),
            "num_experts_per_tok": metadata.whole("expert_used_count"),
            "sliding_window": None,
        }
    return own


def _qwen3moe(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    return {
        "num_experts": _experts(file, metadata),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp normalizes, whatever the model's own config says
    }


def _gemma2(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    return {
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0) or None,
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=46),
    }


def _layer_types(metadata: Metadata, config: Config, every: int) -> list[str]:
    """Each layer's kind of attention: every `every`-th layer sees the whole text.

    Metadata may say another number than `every`; 0 means that no layer sees the whole text.
    """
    pattern = metadata.whole("attention.sliding_window_pattern", every)
    return [
        "full_attention" if pattern and number % pattern == 0 else "sliding_attention"
        for number in range(1, config["num_hidden_layers"] + 1)
    ]


def _gemma3(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    local = metadata.number("rope.freq_base_swa", 10000.0)
    return {
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": _layer_types(metadata, config, every=6),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=62),
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _query_scale(config: Config, layers_of_27b: int) -> int:
    """Queries are divided by the root of this; as in llama.cpp, 27B is known by its layers."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _phi3(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    rotary = metadata.whole("rope.dimension_count", config["head_dim"])
    original = metadata.whole(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    rope = {**config["rope_parameters"], "partial_rotary_factor": rotary / config["head_dim"]}
    return {
        "sliding_window": metadata.whole("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
    }


def _gpt_oss(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    rope = config["rope_parameters"]
    if metadata.number("rope.freq_base_swa", rope["rope_theta"]) != rope["rope_theta"]:
        raise metadata.refusal("layers with windows have a rotary base of their own")
    if rope["rope_type"] == "yarn":
        # as in the models' own config.json; llama.cpp rounds where YaRN's ramp begins and ends
        rope = {**rope, "truncate": False}
    return {
        "intermediate_size": metadata.whole("expert_feed_forward_length"),
        "num_local_experts": _experts(file, metadata),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": _layer_types(metadata, config, every=2),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": rope,
    }


_OWN: Mapping[str, Callable[[GgufFile, Metadata, Config], Config]] = {
    "llama": _llama, "qwen3moe": _qwen3moe, "gemma2": _gemma2, "gemma3": _gemma3, "phi3": _phi3,
    "gpt-oss": _gpt_oss,
}  # fmt: skip
