"""Tiny configurations of every architecture that transformers knows, from its own config classes.

A config class's defaults describe a real model. Each number is made small by what its name says it
counts; kinds of layers and experts all stay, since they are what an architecture has of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

LAYERS = 4
VOCAB = 64
WORDS = range(3, 50)  # token ids that are nothing but words; those above may stand for pictures
POSITIONS = 512

# (pattern over the whole name, small value): the first that fits counts
_SMALL: list[tuple[str, int]] = [
    (r"vocab_size.*|.*_vocab_size|num_embeddings", VOCAB),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length", POSITIONS),
    (r"index_topk", POSITIONS),  # an index that picks all tokens of a text
    (r"v_head_dim", 12),
    (r"qk_head_dim", 16),
    (r"global_head_dim", 16),
    (r"(.*_)?head_dim|head_size|kv_channels|rotary_dim", 8),
    (r".*_lora_rank|.*_rank|hidden_size_per_layer_input", 16),
    (r"(.*_)?(moe|expert|shared|routed)_.*(size|dim)|expert_ffn_hidden_size", 24),
    (r".*(intermediate|ffn|inner|feed_forward|mlp).*(size|dim).*|n_inner|d_ff", 48),
    (r"hidden_size|n_embd|d_model|word_embed_proj_dim|embed_dim|dim|hidden_dim", 32),
    (r".*(key_value|kv)_heads.*|num_kv_heads|num_attention_groups", 2),
    (r".*(attention_heads|num_heads)|n_heads?", 4),
    (r".*experts_per_tok.*|.*top_?k(_experts)?|moe_k|num_selected_experts|moe_top_k", 2),
    (r"num_expert_group.*", 1),
    (r".*shared_experts?|.*zero_expert_num", 1),
    (r"(.*_)?n(um)?_(local_|routed_)?experts|ffn_num_experts|moe_num_experts", 4),
    (r"num_hidden_layers|(n|num)_layers?|(decoder|encoder)_layers|depth", LAYERS),
    (r"num_kv_shared_layers|first_k_dense_replace|num_dense_layers", 1),
    (r"max_window_layers", 2),
    (r"hc_sinkhorn_iters", 3),
    (r"(.*_)?sliding_window(_size)?|attention_chunk_size|floor_scale|window_size", 8),
    (r"image_size", 28),
    (r"patch_size", 14),
]
# names of widths of heads and of rows
_WIDTHS = (
    r"(.*_)?head_dim|head_size|mamba_d_(head|ssm)|kv_channels|rotary_dim|(out_)?hidden_size|n_embd|d_model"
    r"|word_embed_proj_dim|embed_dim|dim|hidden_dim|intermediate_size"
)
_COUNTS_OF_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

# what a default cannot be shrunk by its name alone
_FEW_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
# a row goes to experts of one group alone, and not to all of them
_GROUPS = {"n_group": 2, "topk_group": 1}
_EXPERTS_OF_GROUPS = 8
_PARTIAL_ROPE = {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
}  # fmt: skip
_THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_WINDOWS_BETWEEN = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16}
_MAMBAS_BETWEEN = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
HINTS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
    "llama4": {"pad_token_id": 0},
    "llama4_text": {"moe_layers": [1, 3]},  # the class counts them by the layers of a real model
    "deepseek_v2": _FEW_EXPERTS,
    "dots1": _FEW_EXPERTS,
    "ministral": {"head_dim": 8},
    "mistral4": {"head_dim": 16},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8},
    "glm4v_text": {"head_dim": 16, "rope_parameters": _PARTIAL_ROPE},
    "glm4v_moe_text": {"head_dim": 16, "rope_parameters": _PARTIAL_ROPE},
    "glm_ocr_text": {"head_dim": 16, "rope_parameters": _PARTIAL_ROPE},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "chameleon": {"vocabulary_map": {"<image>": 60, "IMGIMGBS01": 61}},
    "emu3": {"vocabulary_map": {"<image>": 60}},
    "emu3_vqgan": {"base_channels": 32, "hidden_size": 128, "codebook_size": 16},
    "step3p5": {"sliding_window": 8, "layer_types": _WINDOWS_BETWEEN},
    "cohere_compass_text": {
        "layer_types": _WINDOWS_BETWEEN,
        "rope_parameters": {"sliding_attention": _THREE_AXES, "full_attention": None},
    },
    "mamba2": {"expand": 1, "n_groups": 2, "state_size": 16},
    "nemotron_h": {"n_groups": 2, "ssm_state_size": 16},
    "granitemoehybrid": {**_MAMBA, "layer_types": _MAMBAS_BETWEEN},
    "bamba": {**_MAMBA, "attn_layer_indices": [2]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_dt_rank": 4,
    },
    "zamba2": {"attention_head_dim": 16},
    "hy_v4": {"indexer_types": ["full", "shared", "shared", "full"]},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "paddleocr_vl_text": {"rope_parameters": _THREE_AXES},
    "deepseek_ocr2_text": {
        **_FEW_EXPERTS, **_GROUPS, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "molmo2_vision": {"image_size": [28, 28], "num_position_embeddings": 4},
    "molmo2_adapter": {"vision_feature_layer": [3, 1]},
    "granite_docling_vision": {"out_hidden_size": 32, "deepstack_visual_indexes": [1, 2, 3]},
    "radio": {"video_temporal_patch_size": 2},
    "muse_spark_audio": {"out_hidden_size": 32, "hidden_sizes": [8, 8, 8, 8]},
    "granite4_vision": {
        "downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 1, 2, 3],
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 48,
            "num_hidden_layers": LAYERS, "num_attention_heads": 4, "image_size": 28,
            "patch_size": 14,
        },
    },
}  # fmt: skip
_MULTIPLIERS = {
    "embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
}  # fmt: skip
# options that published models set and config classes leave at another default: a type runs if it
# does so with its defaults and with each of these
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "falcon": (
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"multi_query": False, "num_kv_heads": 4, "parallel_attn": False, "bias": True},
    ),
    "cohere": ({"use_qk_norm": True},),
    "glm4_moe": ({"use_qk_norm": True, "attention_bias": True},),
    "granite": (_MULTIPLIERS,),
    "granite_swa": (_MULTIPLIERS,),
    "granitemoe": (_MULTIPLIERS,),
    "granitemoe_swa": (_MULTIPLIERS,),
    "granitemoeshared": (_MULTIPLIERS,),
    "gpt_neox": ({"use_parallel_residual": False},),
    "stablelm": ({"qk_layernorm": True}, {"use_parallel_residual": True}),
    "phi": ({"qk_layernorm": True},),
    "persimmon": ({"qk_layernorm": False},),
    "llama4_text": ({"use_qk_norm": False},),
    # DeepSeek-V2's own way, where V2-Lite's is the default, which has a query without a latent
    "deepseek_v2": (
        {**_GROUPS, "topk_method": "group_limited_greedy"},
        {"q_lora_rank": None},
    ),
    "deepseek_v3": ({"q_lora_rank": None},),
    # GLM-5.2: layers that see what an earlier one's index picked
    "glm_moe_dsa": ({"indexer_types": ["full", "shared", "shared", "full"]},),
    # Olmo-Hybrid-Instruct-DPO-7B: no positions, said by a base that is null
    "olmo_hybrid": ({"rope_parameters": {"rope_type": "default", "rope_theta": None}},),
    "zamba2": (
        {"use_mem_rope": True, "use_shared_attention_adapter": True},
        {"use_mem_rope": True, "num_mem_blocks": 2},
    ),
}  # fmt: skip

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def tiny_config(
    model_type: str, options: Mapping[str, Any] = NO_OPTIONS, widen: int = 1
) -> PretrainedConfig:
    """A configuration of a few thousand weights.

    Args:
        options: values in place of the small ones, as VARIANTS has them.
        widen: how many times wider heads and rows are than in the smallest model; with 8 and 16
            most types have heads of 64 and 128.
    Raises:
        KeyError: the type's config class has no such option.
    """
    kind = CONFIG_MAPPING[model_type]
    small = _widened(_shrunk(kind), widen)
    if unknown := options.keys() - kind().to_dict().keys():
        raise KeyError(f"{model_type} has no option '{min(unknown)}'")
    return kind(**{**small, **options})


def _shrunk(kind: type[PretrainedConfig]) -> dict[str, Any]:
    default = kind()
    parts = kind.sub_configs or {}
    layers = next((n for n in (getattr(default, c, None) for c in _COUNTS_OF_LAYERS) if n), 0)
    small: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        if name in parts or name in ("model_type", "transformers_version", "architectures"):
            continue
        if isinstance(value, list) and layers > LAYERS and len(value) == layers:
            small[name] = _fewer(value)
        elif (shrunk := _small(name, value)) != value:
            small[name] = shrunk
    queries, keys = ("num_attention_heads", "num_key_value_heads")
    if keys in small and getattr(default, queries, None) == getattr(default, keys, None):
        small[keys] = small[queries]  # as many in the architecture, so in its small one
    for name in parts:
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            small[name] = {**_shrunk(type(part)), "model_type": part.model_type}
    if "mrope_section" in getattr(kind, "ignore_keys_at_rope_validation", ()):
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        small["rope_parameters"] = rope
    if getattr(default, "n_group", None):
        small |= _GROUPS
        few = dict.fromkeys(("n_routed_experts", "num_experts"), _EXPERTS_OF_GROUPS)
        small |= {name: count for name, count in few.items() if name in small}
    return {**small, **HINTS.get(kind.model_type, {})}


def _widened(small: Mapping[str, Any], times: int) -> dict[str, Any]:
    """The values with those made wider that say how wide heads and rows are."""
    found: dict[str, Any] = {}
    for name, value in small.items():
        if isinstance(value, dict):
            value = _widened(value, times)
        elif name == "mrope_section":
            value = [each * times for each in value]
        elif re.fullmatch(_WIDTHS, name) and isinstance(value, int):
            value *= times  # lists of widths, one for each layer, are as wide as real ones already
        found[name] = value
    return found


def _fewer(values: list[Any]) -> list[Any]:
    """One value for each of LAYERS layers: every kind there is, and the last layer's last."""
    kinds = [value for at, value in enumerate(values) if value not in values[:at]]
    order = kinds[kinds.index(values[-1]) + 1 :] + kinds[: kinds.index(values[-1]) + 1]
    return [order[(at - LAYERS) % len(order)] for at in range(LAYERS)]


def _small(name: str, value: Any) -> Any:
    if name in ("bos_token_id", "eos_token_id"):
        return {"bos_token_id": 1, "eos_token_id": 2}[name]
    if name == "pad_token_id":
        return None if value is None else 0
    if re.search(r"token_(id|index)$", name):
        return WORDS.stop + 10
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    for pattern, small in _SMALL:
        if re.fullmatch(pattern, name):
            return small if small == POSITIONS else min(small, value)
    return value
