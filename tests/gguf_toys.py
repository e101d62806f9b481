"""Small models of every architecture of GGUF files that is read, for llama.cpp's converter.

Weights follow from their names: each is -1/4 or 1/4, by a bit of a hash. So they are the same
wherever they are made, are exact in every dtype, and compress to a bit.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from checkpoints import BYTE_VOCAB, save_byte_tokenizer
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from conformance_configs import tiny_config

GOLDENS = Path(__file__).parent / "goldens" / "gguf_converted.tar.xz"


@dataclass(frozen=True)
class Toy:
    """A small model."""

    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)  # see tiny_config
    # what published configs say beside transformers' own values, and the converter asks for; None
    # for what they leave out
    said: Mapping[str, Any] = field(default_factory=dict)


_EVERY_FOURTH = {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_KIMI = {
    "first_k_dense_replace": 1, "moe_router_activation_func": "sigmoid", "linear_attn_config":
    {"full_attn_layers": [1, 3], "short_conv_kernel_size": 4, "head_dim": 8, "num_heads": 4},
}  # fmt: skip
_MULTIPLIERS = {
    "embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
}  # fmt: skip
_NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
_GEMMA = {"query_pre_attn_scalar": 8}  # the size of a head
# llama.cpp's constants, which no file has
_LLAMA4 = {
    "attention_chunk_size": 8192, "floor_scale": 8192, "no_rope_layers": [1, 1, 1, 0],
    "layer_types": [*["chunked_attention"] * 3, "full_attention"],
}  # fmt: skip
_TWICE_AS_WIDE = {"intermediate_size": 64}
_PHIMOE = {"architectures": ["PhiMoEForCausalLM"]}  # transformers' class has another spelling
_MSCALES = {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
_LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "long_factor": [1.5, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3],
}  # fmt: skip

# value heads that share key heads, which the converter puts in another order
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}  # fmt: skip
_DELTA_FIRST = {"layer_types": [*["linear_attention"] * 3, "full_attention"]}
_MAMBAS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_AS_STORED = ["mamba", "mamba", "attention", "mamba"]
_BLOCKS = ["linear_attention", "moe", "full_attention", "moe"]

_FOUR_EXPERTS = {  # and nothing for each layer beside, as in Gemma 4 26B-A4B
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
_GROWING = {  # queries, every 16 positions
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}  # fmt: skip
_ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 3.0}
# published configs say for each kind of layer what transformers' say once, or the other way round
_FIRST_WHOLE = {"layer_types": ["full_attention", *["sliding_attention"] * 3]}
_BOTH_ENDS_WHOLE = {"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]}
_LAGUNA_ROPE = {
    "full_attention": {
        "rope_type": "yarn", "rope_theta": 5e5, "partial_rotary_factor": 0.5, "factor": 16.0,
        "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
        "attention_factor": 1.25,
    },
    "sliding_attention": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
    },
}  # fmt: skip
_MIMO_ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5}
_STEP = tiny_config("step3p7").to_dict()["text_config"]
del _STEP["per_layer_config"]  # it follows from the heads of layers with windows
_STEP_ROPE = {
    "full_attention": {
        "rope_type": "llama3", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 2.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "sliding_attention": {
        "rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 1.0,
    },
}  # fmt: skip
_THREE_AXES = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}


def _seeing(name: str) -> Mapping[str, Any]:
    """What the config of a model says whose part for text is another type's."""
    return {"architectures": [f"{name}ForConditionalGeneration"], **_THREE_AXES}


TOYS: Mapping[str, Toy] = {
    "afmoe": Toy("afmoe", {"mup_enabled": True, **_EVERY_FOURTH}),
    "apertus": Toy("apertus"),
    "arcee": Toy("arcee"),
    "bamba": Toy("bamba", {}, {"attn_rotary_emb": 4}),
    "cohere": Toy("cohere"),
    "cohere-norms": Toy("cohere", {"use_qk_norm": True}),
    "cohere2": Toy("cohere2", _EVERY_FOURTH, {"rotary_pct": 1.0}),
    "cohere2_moe": Toy("cohere2_moe", _EVERY_FOURTH),
    "dbrx": Toy("dbrx"),
    "deepseek_v2": Toy("deepseek_v2"),
    "deepseek_v2-groups": Toy(
        "deepseek_v2", {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"}
    ),
    "deepseek_v2-lite": Toy("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3": Toy("deepseek_v3"),
    "deepseek_v32": Toy("deepseek_v32"),
    "dots1": Toy("dots1"),
    "ernie4_5": Toy("ernie4_5"),
    "ernie4_5_moe": Toy("ernie4_5_moe"),
    "exaone4": Toy("exaone4", _EVERY_FOURTH),
    "exaone_moe": Toy("exaone_moe", {**_EVERY_FOURTH, **_DENSE_FIRST}),
    "falcon": Toy("falcon", {"num_kv_heads": 1, "new_decoder_architecture": False}),
    "falcon_h1": Toy(
        "falcon_h1",
        {"mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
        {"head_dim": 8},
    ),
    "falcon-40b": Toy("falcon", _NEW_FALCON),
    "falcon-11b": Toy("falcon", {**_NEW_FALCON, "num_ln_in_parallel_attn": 1}),
    "falcon_mamba": Toy("falcon_mamba", _TWICE_AS_WIDE),
    "gemma": Toy("gemma"),
    "gemma2": Toy("gemma2", _GEMMA),
    "gemma3_text": Toy("gemma3_text", {**_GEMMA, "layer_types": ["sliding_attention"] * 4}),
    "gemma3n_text": Toy("gemma3n_text", {"intermediate_size": [48] * 4}),
    "gemma4_text": Toy("gemma4_text"),
    "gemma4_text-experts": Toy("gemma4_text", {**_FOUR_EXPERTS, **_EVERY_FOURTH}),
    "glm": Toy("glm", {"rms_norm_eps": 1e-5}),  # the converter writes no other
    "glm4": Toy("glm4"),
    "glm4v": Toy(
        "glm4", {"attention_bias": True},
        {"architectures": ["Glm4vForConditionalGeneration"],
         "rope_parameters": {**_HALF, "mrope_section": [1, 1, 0]}},
    ),
    "glm4_moe": Toy("glm4_moe"),
    "glm4_moe-norms": Toy("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_lite": Toy("glm4_moe_lite", _DENSE_FIRST),
    "glm_moe_dsa": Toy("glm_moe_dsa", {"indexer_types": ["full", "full", "shared", "full"]}),
    "gpt2": Toy("gpt2", {}, {"n_ctx": 512}),
    "gpt_bigcode": Toy("gpt_bigcode"),
    "gpt_neox": Toy("gpt_neox", {}, {"rotary_pct": 0.25}),
    "gpt_neox-serial": Toy("gpt_neox", {"use_parallel_residual": False}, {"rotary_pct": 0.25}),
    "gpt_oss": Toy("gpt_oss"),
    "granite": Toy("granite", _MULTIPLIERS),
    "granite_swa": Toy(
        "granite_swa", {**_MULTIPLIERS, **_EVERY_FOURTH, "layer_rope_theta": [1e4, 1e4, 0, 1e4]},
        {"no_rope_layers": [1, 1, 0, 1]},
    ),
    "granitemoe": Toy("granitemoe", _MULTIPLIERS),
    "granitemoe_swa": Toy(
        "granitemoe_swa",
        {**_MULTIPLIERS, **_EVERY_FOURTH, "layer_rope_theta": [1e4, 1e4, 0, 1e4],
         "shared_intermediate_size": 24},
        {"no_rope_layers": [1, 1, 0, 1]},
    ),
    "granitemoehybrid": Toy(
        "granitemoehybrid", {**_MULTIPLIERS, "layer_types": _MAMBAS}, {"layer_types": _AS_STORED}
    ),
    "granitemoehybrid-dense": Toy(
        "granitemoehybrid",
        {"layer_types": _MAMBAS, "num_local_experts": 0, "num_experts_per_tok": 0},
        {"layer_types": _AS_STORED},
    ),
    "granitemoeshared": Toy("granitemoeshared", {**_MULTIPLIERS, "shared_intermediate_size": 24}),
    "hunyuan_v1_dense": Toy("hunyuan_v1_dense"),
    "hunyuan_v1_moe": Toy(
        "hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "intermediate_size": 48},
        {"moe_intermediate_size": [48] * 4, "moe_topk": [2] * 4, "num_shared_expert": [1] * 4},
    ),
    "hunyuan_vl": Toy(
        "hunyuan_v1_dense", {"rope_parameters": _ALPHA},
        {"architectures": ["HunYuanVLForConditionalGeneration"],
         "rope_parameters": {**_ALPHA, "mrope_section": [2, 1, 1]}},
    ),
    "hy_v3": Toy("hy_v3"),
    "jais2": Toy("jais2"),
    "jamba": Toy("jamba"),
    "kimi_linear": Toy("kimi_linear", {"num_expert_group": 1, **_DENSE_FIRST}, _KIMI),
    "laguna": Toy(
        "laguna",
        {**_FIRST_WHOLE, **_DENSE_FIRST, "rope_parameters": _LAGUNA_ROPE,
         "num_attention_heads_per_layer": [4, 6, 6, 6], "moe_routed_scaling_factor": 2.5},
    ),
    "laguna-elements": Toy(
        "laguna",
        {**_DENSE_FIRST, "gating": "per-element", "num_attention_heads_per_layer": [4] * 4},
        {"sliding_window": None},
    ),
    "lfm2": Toy("lfm2"),
    "lfm2_moe": Toy("lfm2_moe"),
    "llama": Toy("llama", {"num_key_value_heads": 2}),
    "llama4_text": Toy("llama4_text", _LLAMA4),
    "mamba": Toy("mamba", _TWICE_AS_WIDE),
    # whose steps' projection has rows of a whole block
    "mamba-wide": Toy("mamba", {**_TWICE_AS_WIDE, "time_step_rank": 32}),
    "mamba2": Toy("mamba2", {"expand": 2, "num_heads": 8}),
    "mellum": Toy("mellum", _EVERY_FOURTH),
    "mimo_v2_flash": Toy(
        "mimo_v2_flash",
        {**_DENSE_FIRST, **_BOTH_ENDS_WHOLE, "rope_parameters": {
            "full_attention": {**_MIMO_ROPE, "rope_theta": 5e6},
            "sliding_attention": {**_MIMO_ROPE, "rope_theta": 1e4}}},
        {"hybrid_layer_pattern": [0, 1, 1, 0], "sliding_window": 7, "layernorm_epsilon": 1e-5,
         "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_v_head_dim": 12,
         "swa_num_key_value_heads": 4, "topk_method": "noaux_tc", "rope_parameters": None,
         "rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "minicpm3": Toy("minicpm3"),
    "minimax_m2": Toy("minimax_m2", {"rope_parameters": _HALF}, {"rotary_dim": 4}),
    "ministral3": Toy("ministral3", {"rope_parameters": _GROWING}),
    "mistral": Toy("mistral", {"sliding_window": None}),
    "mistral4": Toy(
        "mistral4", {"rope_parameters": {**_GROWING, "llama_4_scaling_beta": 0.1}},
        {"architectures": ["Mistral3ForConditionalGeneration"]},
    ),
    "mixtral": Toy("mixtral"),
    "muse_glimmer": Toy("muse_glimmer"),
    "nemotron": Toy("nemotron"),
    "nemotron_h": Toy("nemotron_h", {"layers_block_type": _BLOCKS, "mamba_num_heads": 8}),
    "nemotron_h-dense": Toy(
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
         "mamba_num_heads": 8},
        {"hybrid_override_pattern": "M-*-", "num_experts_per_tok": None, "n_routed_experts": None,
         "n_group": None, "topk_group": None},
    ),
    "olmo": Toy("olmo", {"clip_qkv": 2.0}),
    "olmo2": Toy("olmo2"),
    "olmo3": Toy("olmo3", _EVERY_FOURTH),
    "olmoe": Toy("olmoe"),
    "paddleocr": Toy("seed_oss", {}, _seeing("PaddleOCRVL")),
    "phi": Toy("phi"),
    "phi3": Toy("phi3", {"sliding_window": None}),
    "phimoe": Toy(
        "phimoe", {"attention_bias": True, "lm_head_bias": True},
        {**_PHIMOE, "original_max_position_embeddings": 512},
    ),
    "phimoe-long": Toy("phimoe", {"rope_parameters": {**_LONG_ROPE, **_MSCALES}}, _PHIMOE),
    "qwen2": Toy("qwen2"),
    "qwen2_vl": Toy("qwen2", {}, _seeing("Qwen2VL")),
    "qwen2_moe": Toy("qwen2_moe"),
    "qwen3": Toy("qwen3"),
    "qwen3_moe": Toy("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_vl": Toy("qwen3", {}, _seeing("Qwen3VL")),
    "qwen3_vl_moe": Toy("qwen3_moe", {"norm_topk_prob": True}, _seeing("Qwen3VLMoe")),
    "qwen3_5": Toy("qwen3_5_text", {**_DELTA, **_DELTA_FIRST}),
    "qwen3_5_moe": Toy("qwen3_5_moe_text", {**_DELTA, **_DELTA_FIRST}),
    "qwen3_next": Toy("qwen3_next", {**_DELTA, **_DELTA_FIRST}),
    "seed_oss": Toy("seed_oss"),
    "smollm3": Toy("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "solar_open": Toy("solar_open", {"rope_parameters": {**_HALF, "partial_rotary_factor": 1.0}}),
    "stablelm": Toy("stablelm"),
    "stablelm-parallel": Toy("stablelm", {"use_parallel_residual": True}),
    "starcoder2": Toy("starcoder2", {"sliding_window": None}),
    "step3p7": Toy(
        "step3p7",
        {"text_config": {
            **_STEP, **_BOTH_ENDS_WHOLE, **_DENSE_FIRST,
            "rope_parameters": _STEP_ROPE, "num_sliding_attention_heads": 6,
            "moe_router_scaling_factor": 3.0, "swiglu_limits": [None, 0.0, 0.5, 0.25],
            "swiglu_limits_shared": [None, 0.0, 0.25, 0.5]}},
        {"rope_theta": [1e4, 2e4, 2e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
         "rope_parameters": _STEP_ROPE["full_attention"],
         "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2,
         "moe_layers_enum": "1,2,3", "attention_other_setting": {"num_attention_heads": 6,
         "num_attention_groups": 2}},
    ),
    "youtu": Toy("youtu"),
}  # fmt: skip


def converted(name: str, folder: Path) -> Path:
    """The file that the converter made of a toy."""
    path = folder / f"{name}.gguf"
    path.write_bytes(goldens()[path.name])
    return path


@lru_cache
def goldens() -> Mapping[str, bytes]:
    """All files by their names. Tensors of one name are the same in many files, and packed once."""
    with tarfile.open(GOLDENS, "r:xz") as archive:
        return {each.name: archive.extractfile(each).read() for each in archive}


def write_goldens(files: Mapping[str, bytes]) -> None:
    """Writes the archive of all files, with the same bytes for the same files."""
    with tarfile.open(GOLDENS, "w:xz", preset=9) as archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def toy_config(toy: Toy) -> PretrainedConfig:
    return tiny_config(toy.model_type, toy.options)


def save_toy(toy: Toy, folder: Path) -> PreTrainedModel:
    """Writes a toy as safetensors, and returns transformers' model."""
    config = toy_config(toy)
    by = transformers.AutoModelForCausalLM
    if type(config) not in by._model_mapping:  # such as Mistral 4, which sees in published models
        by = transformers.AutoModelForImageTextToText
    model = by.from_config(config, dtype=torch.float32)
    fill_by_names(model.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    return model.eval()


def save_hybrid(folder: Path) -> None:
    """Writes a small Qwen3.5, whose recurrent layers and matrices are wide enough for a copy in few
    bits, with a tokenizer of bytes."""
    sizes = {"vocab_size": BYTE_VOCAB, "hidden_size": 64, "intermediate_size": 128,
             "linear_num_value_heads": 4, "num_attention_heads": 4, "head_dim": 16}  # fmt: skip
    toy = TOYS["qwen3_5"]
    save_toy(replace(toy, options={**toy.options, **sizes}), folder)
    save_byte_tokenizer(folder)


@torch.no_grad()
def fill_by_names(tensors: Mapping[str, Tensor], before: str = "") -> None:
    """Gives all tensors of numbers the values of their names, with `before` in front of these."""
    for name, values in tensors.items():
        if values.is_floating_point():
            found = torch.from_numpy(toy_values(before + name, values.numel()))
            values.copy_(found.view(values.shape))


def toy_values(name: str, count: int) -> np.ndarray:
    """(count,) float32: the values of a tensor of this name."""
    raw = hashlib.shake_128(name.encode()).digest(-(-count // 8))
    bits = np.unpackbits(np.frombuffer(raw, np.uint8))[:count]
    return (bits.astype(np.float32) - 0.5) / 2
