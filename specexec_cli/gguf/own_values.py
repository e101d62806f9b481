"""Values of transformers' configs that the table of architectures.py cannot say in a line.

Values that no file has are as in llama.cpp's src/models (ggml-org/llama.cpp, b11549).
"""

from __future__ import annotations

from collections.abc import Callable
from math import erf, sqrt
from typing import Any

from specexec_cli.gguf.container import GgufFile, shown
from specexec_cli.gguf.counts import expert_count, layers_with
from specexec_cli.gguf.metadata import Metadata
from specexec_cli.gguf.rotary import factored, short_list

Config = dict[str, Any]
Own = Callable[[GgufFile, Metadata, Config], Config]


def llama(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Mixtral has the name of Llama, and experts."""
    if not metadata.whole("expert_count", 0):
        return {}
    return {
        "model_type": "mixtral",
        "num_local_experts": metadata.counted("expert_count", "experts", expert_count(file)),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "sliding_window": None,
    }


def mistral3(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Ministral 3, whose queries grow with their positions; without that it is as Llama."""
    if not metadata.number("attention.temperature_scale", 0.0):
        return {"model_type": "llama"}
    return {"rope_parameters": _growing(metadata, config)}


def mistral4(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Mistral 4, which has latent attention, experts, and queries that grow."""
    if config["rope_parameters"]["rope_type"] != "yarn":  # transformers would turn whole heads
        raise metadata.refusal("its positions are not scaled by YaRN, as Mistral 4's are")
    latent = latent_attention(metadata, config)
    rope = _growing(metadata, config, usual=0.1)
    # the converter writes a tenth of it, as for DeepSeek
    rope["mscale_all_dim"] = round(10 * rope["mscale_all_dim"], 6)
    size = latent["qk_rope_head_dim"] + latent["qk_nope_head_dim"]
    rope["partial_rotary_factor"] = latent["qk_rope_head_dim"] / max(1, size)
    return {
        **latent, **dense_first(file, metadata, config), "head_dim": size, "rope_parameters": rope
    }  # fmt: skip


def _growing(metadata: Metadata, config: Config, usual: float | None = None) -> Config:
    """Rotary parameters where queries grow with their positions.

    Args:
        usual: how much they grow where the file does not say it.
    """
    rope = {
        **config["rope_parameters"], "mscale": 1.0,
        "llama_4_scaling_beta": metadata.number("attention.temperature_scale", usual),
        "mscale_all_dim": metadata.number("rope.scaling.yarn_log_multiplier", 0.0),
    }  # fmt: skip
    # with or without YaRN, queries grow by steps of this many positions
    step = metadata.whole("rope.scaling.original_context_length", config["max_position_embeddings"])
    if not step:
        raise metadata.refusal("its queries grow with positions, by steps of 0 positions")
    return {**rope, "original_max_position_embeddings": step}


def gemma2(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Windows, soft caps and the scale of queries."""
    return {
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0) or None,
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=46),
    }


def _layer_types(metadata: Metadata, config: Config, every: int, first: bool = False) -> list[str]:
    """Each layer's kind of attention: every `every`-th layer sees the whole text.

    Metadata may have a number in place of `every`, where 0 means that no layer sees the whole text,
    or say for each layer whether it has a window.

    Args:
        first: whether of each `every` layers the first sees it, and not the last.
    """
    layers = config["num_hidden_layers"]
    pattern = metadata.value("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) < layers or not all(isinstance(each, bool | int) for each in pattern):
            raise metadata.refusal(
                f"its metadata do not say of each of {layers} layers whether it has a window"
            )
        windows = [bool(each) for each in pattern[:layers]]
    else:
        every = metadata.whole("attention.sliding_window_pattern", every)
        windows = [
            not every or number % every != 0 for number in range(not first, layers + (not first))
        ]
    return ["sliding_attention" if each else "full_attention" for each in windows]


def windows(every: int) -> Own:
    """A window in all layers but every `every`-th; no window where the file names none."""

    def own(file: GgufFile, metadata: Metadata, config: Config) -> Config:
        if not metadata.whole("attention.sliding_window", 0):
            return {"sliding_window": None, "layer_types": ["full_attention"] * _layers_of(config)}
        return {"layer_types": _layer_types(metadata, config, every)}

    return own


def _layers_of(config: Config) -> int:
    return int(config["num_hidden_layers"])


def _two_bases(metadata: Metadata, config: Config, local: float) -> Config:
    """Rotary parameters of layers with a window and of those without."""
    base = metadata.number("rope.freq_base_swa", local)
    return {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": base},
    }


def gemma3(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Windows, their rotary base, and the scale of queries."""
    return {
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": _layer_types(metadata, config, every=6),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=62),
        "rope_parameters": _two_bases(metadata, config, 10000.0),
    }


def _query_scale(config: Config, layers_of_27b: int) -> int:
    """Queries are divided by the root of this; as in llama.cpp, 27B is known by its layers."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def phi3(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """The window, and rotary factors for long texts."""
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


def phimoe(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Rotary factors for long texts, and what cosines are multiplied by with them."""
    rope = config["rope_parameters"]
    if rope["rope_type"] != "longrope":
        return {"sliding_window": metadata.whole("attention.sliding_window", 0) or None}
    kept = {key: value for key, value in rope.items() if key != "attention_factor"}
    return {
        "sliding_window": metadata.whole("attention.sliding_window", 0) or None,
        # of Phi-3.5-MoE, the one model with such factors; files say what Phi-3 would have
        "rope_parameters": {**kept, "short_mscale": _MSCALE, "long_mscale": _MSCALE},
    }


def minicpm3(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Latent attention. Multipliers are the class's own, as in llama.cpp: no file has them."""
    own = latent_attention(metadata, config)
    up, heads = file.tensors.get("blk.0.attn_kv_b.weight"), config["num_attention_heads"]
    if up is None or not up.shape or up.shape[0] % heads:
        raise metadata.refusal("its latent attention has no 'attn_kv_b' for that many heads")
    return {**own, "v_head_dim": up.shape[0] // heads - own["qk_nope_head_dim"]}


def gpt_oss(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Windows, and YaRN as the models have it."""
    rope = config["rope_parameters"]
    if metadata.number("rope.freq_base_swa", rope["rope_theta"]) != rope["rope_theta"]:
        raise metadata.refusal("layers with windows have a rotary base of their own")
    if rope["rope_type"] == "yarn":
        # as in the models' own config.json; llama.cpp rounds where YaRN's ramp begins and ends
        rope = {**rope, "truncate": False}
    return {
        "intermediate_size": metadata.whole("expert_feed_forward_length"),
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": _layer_types(metadata, config, every=2),
        "rope_parameters": rope,
    }


_MSCALE = 1.243163121016122
_STILL = 1e29  # factors of Gemma 4's frequencies that do not turn are 1e30
_SIGMOID, _SOFTMAX = 2, 1  # values of expert_gating_func


def latent_attention(metadata: Metadata, config: Config) -> Config:
    """Sizes of attention whose keys and values come from one small projection."""
    rotary = metadata.whole("rope.dimension_count")
    keys = metadata.whole("attention.key_length_mla", config["head_dim"])
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": metadata.whole("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": metadata.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": keys - rotary,
        "v_head_dim": metadata.whole(
            "attention.value_length_mla", metadata.whole("attention.value_length", 0)
        ),
        "head_dim": rotary,
    }


def deepseek2(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """DeepSeek-V2 and V3, and the others with its latent attention."""
    own = latent_attention(metadata, config)
    if not metadata.whole("expert_count", 0):
        return {**own, "model_type": "youtu"}
    own |= dense_first(file, metadata, config)
    own["n_routed_experts"] = metadata.counted("expert_count", "experts", expert_count(file))
    # files of before this key are of V2; V3 has a correction for each expert
    corrected = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    gate = metadata.whole("expert_gating_func", _SIGMOID if corrected else _SOFTMAX)
    if gate == _SIGMOID:
        return {**own, "model_type": "deepseek_v3", "rope_interleave": True}
    method = "greedy" if metadata.whole("expert_group_count", 1) <= 1 else "group_limited_greedy"
    return {**own, "topk_method": method}


def indexed_attention(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """DeepSeek-V3.2 and GLM-5: latent attention, and how many tokens an index picks for a row."""
    picked = metadata.whole("attention.indexer.top_k")
    if not picked:
        raise metadata.refusal("its index picks 0 tokens for a row to see")
    return {
        **latent_attention(metadata, config), **sparse_layers(file, metadata, config),
        "index_topk": picked,
    }  # fmt: skip


def falcon(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Groups of heads, and one norm or two."""
    groups = metadata.whole("attention.head_count_kv", 1)
    up = file.tensors.get("blk.0.ffn_up.weight")
    if not groups or config["num_attention_heads"] % groups or up is None:
        raise metadata.refusal(f"it has {groups} groups of heads, or no MLP")
    two = "blk.0.attn_norm_2.weight" in file.tensors
    return {
        "num_kv_heads": groups, "multi_query": groups == 1,
        "new_decoder_architecture": groups > 1 or two, "num_ln_in_parallel_attn": 1 + two,
        "num_key_value_heads": groups, "ffn_hidden_size": up.shape[0] if up.shape else 0,
    }  # fmt: skip


def feed_forward_as_stored(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """The width of the MLP by its tensor: the converter writes four times the hidden size."""
    up = file.tensors.get("blk.0.ffn_up.weight")
    width = up.shape[0] if up is not None and len(up.shape) == 2 else config["intermediate_size"]
    return {"intermediate_size": width, "n_inner": width}


def dense_first(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """How many layers come before the first that has experts, by the tensors."""
    sparse = layers_with(file, "ffn_down_exps")
    return {"first_k_dense_replace": min(sparse, default=_layers_of(config))}


def sparse_layers(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Which layers have experts, by the tensors."""
    sparse = layers_with(file, "ffn_down_exps")
    kinds = ["sparse" if n in sparse else "dense" for n in range(_layers_of(config))]
    return {"mlp_layer_types": kinds}


def olmo2(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """OLMo 3 has the name of OLMo 2, and windows."""
    if not metadata.whole("attention.sliding_window", 0):
        return {}
    return {
        "model_type": "olmo3",
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": _layer_types(metadata, config, every=4),
    }


def granite(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Granite's scale of scores where the file says none: that of most models, as in llama.cpp,
    where transformers' config class has 1."""
    if metadata.number("attention.scale", 0.0) or not config["head_dim"]:
        return {}
    return {"attention_multiplier": float(config["head_dim"]) ** -0.5}


def granitemoe(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Experts that every row goes to are another model type."""
    scale = granite(file, metadata, config)
    width = metadata.whole("expert_shared_feed_forward_length", 0)
    if not width:
        return scale
    return {**scale, "model_type": "granitemoeshared", "shared_intermediate_size": width}


def granite_swa(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Windows, which layers turn heads by their positions, and experts if there are any."""
    layers, pattern = _layers_of(config), metadata.value("attention.rope_pattern")
    if pattern is None:
        pattern = [True] * layers
    if not isinstance(pattern, list) or len(pattern) < layers:
        raise metadata.refusal(f"its metadata do not say of each of {layers} layers how it turns")
    theta, mixture = config["rope_parameters"]["rope_theta"], Config()
    if metadata.whole("expert_count", 0):
        mixture = {
            "model_type": "granitemoe_swa",
            "num_local_experts": metadata.counted("expert_count", "experts", expert_count(file)),
            "num_experts_per_tok": metadata.whole("expert_used_count"),
            "shared_intermediate_size": metadata.whole("expert_shared_feed_forward_length", 0),
        }
    return {
        **mixture,
        "layer_types": _layer_types(metadata, config, 4),
        "layer_rope_theta": [theta if turns else 0 for turns in pattern[:layers]],
        **granite(file, metadata, config),
    }


def hunyuan_vl(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """The factor by which its rotary base grows."""
    alpha = metadata.number("rope.scaling.alpha", 0.0)
    if alpha <= 0:
        return {}
    theta = config["rope_parameters"]["rope_theta"]
    rope = {"rope_type": "dynamic", "rope_theta": theta, "factor": 1.0, "alpha": alpha}
    return {"rope_parameters": rope}  # whose factor transformers does not use beside alpha


def llama4(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Which layers have experts, and constants of the models."""
    return {
        "intermediate_size": metadata.whole("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "moe_layers": sorted(layers_with(file, "ffn_down_exps")),
        "use_qk_norm": metadata.whole("expert_count") != 128,  # Maverick has 128 experts
        "attention_chunk_size": 8192,
    }


def laguna(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Windows, heads of each layer, how wide the gates of their outputs are, and experts."""
    layers, size = _layers_of(config), config["head_dim"]
    gate = file.tensors.get("blk.0.attn_gate.weight")
    heads = metadata.each("attention.head_count", layers)
    if gate is None or not size:
        raise metadata.refusal("it has no 'attn_gate', or heads of 0 numbers")
    whole = metadata.whole("rope.dimension_count", size)
    if metadata.whole("attention.sliding_window", 0):
        types = _layer_types(metadata, config, every=4, first=True)
    else:
        types = ["full_attention"] * layers
    rope = _two_bases(metadata, config, config["rope_parameters"]["rope_theta"])
    turned = {"full_attention": whole,
              "sliding_attention": metadata.whole("rope.dimension_count_swa", whole)}  # fmt: skip
    return {
        "layer_types": types,
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if gate.shape[:1] == (heads[0],) else "per-element",
        "rope_parameters": {
            kind: {**values, "partial_rotary_factor": turned[kind] / size}
            for kind, values in rope.items()
        },
        **sparse_layers(file, metadata, config),
    }


def mimo2(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """MiMo-V2: windows, in which there are twice as many heads of keys, and experts."""
    size, types = config["head_dim"], _layer_types(metadata, config, every=6)
    keys = _of_kinds(metadata, "attention.head_count_kv", types)
    many = keys.get("full_attention", keys.get("sliding_attention", 0) // 2)
    of_kinds = {"full_attention": many, "sliding_attention": 2 * many}
    if not size or any(of_kinds[kind] != count for kind, count in keys.items()):
        raise metadata.refusal(
            f"its layers have {shown(str(keys))} heads of keys of {size} numbers"
        )
    turned = metadata.whole("rope.dimension_count", size) / size
    rope = _two_bases(metadata, config, config["rope_parameters"]["rope_theta"])
    return {
        "layer_types": types,
        "num_key_value_heads": many,
        "v_head_dim": metadata.whole("attention.value_length", size),
        # the file leaves out the token itself, as its makers do; transformers counts it
        "sliding_window": metadata.whole("attention.sliding_window") + 1,
        "attention_value_scale": metadata.number("attention.value_scale", 1.0),
        "rope_parameters": {
            kind: {**values, "partial_rotary_factor": turned} for kind, values in rope.items()
        },
        **sparse_layers(file, metadata, config),
    }


def _of_kinds(metadata: Metadata, key: str, types: list[str]) -> dict[str, int]:
    """A number of heads for each kind of layers, of which the file has one for each layer."""
    each = metadata.each(key, len(types))
    found = dict(zip(types, each, strict=True))
    if [found[kind] for kind in types] != each:
        raise metadata.refusal(
            f"its metadata says {shown(each)} as '{metadata.architecture}.{key}', of layers that "
            "are of the same kind"
        )
    return found


def muse_glimmer(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Windows, and what queries are multiplied by, which the converter stores as a norm."""
    layers = _layers_of(config)
    scales = [_scale_of_queries(file, metadata, layer) for layer in range(layers)]
    if len(set(scales)) > 1:
        raise metadata.refusal("its layers multiply queries by different numbers")
    types = _layer_types(metadata, config, every=4)
    theta = config["rope_parameters"]["rope_theta"]
    return {
        "layer_types": types,
        "qk_scale_factor": scales[0],
        # layers that see the whole text turn no heads
        "layer_rope_theta": [theta if kind == "sliding_attention" else 0 for kind in types],
    }


def _scale_of_queries(file: GgufFile, metadata: Metadata, layer: int) -> float:
    """The one number in a layer's norm of queries, where its norm of keys is of ones."""
    norms = [file.tensors.get(f"blk.{layer}.attn_{part}_norm.weight") for part in "qk"]
    if None in norms:
        raise metadata.refusal(f"layer {layer} has no norm of queries or of keys")
    queries, keys = (set(short_list(norm)) for norm in norms if norm is not None)
    if len(queries) != 1 or keys != {1.0}:
        raise metadata.refusal(f"the norms of queries and keys of layer {layer} are no constants")
    return queries.pop()


def step35(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Step-3.5 and 3.7: windows, in which there are other heads, experts, and their limits."""
    layers, size = _layers_of(config), config["head_dim"]
    # as the makers' config, lists go on with the layers that predict further tokens
    whole = layers + metadata.whole("nextn_predict_layers", 0)
    types = _layer_types(metadata, {**config, "num_hidden_layers": whole}, every=4)
    heads = _of_kinds(metadata, "attention.head_count", types)
    keys = metadata.each("attention.head_count_kv", whole)
    if not size or len(set(keys)) != 1:
        raise metadata.refusal("its layers have different numbers of heads of keys")
    queries = heads.get("full_attention", heads.get("sliding_attention", 0))
    theta = config["rope_parameters"]["rope_theta"]
    rope = _two_bases(metadata, config, theta)
    # as in llama.cpp, layers without a window turn half of what the others turn
    turned = metadata.whole("rope.dimension_count", size)
    if (factors := file.tensors.get("rope_freqs.weight")) is not None:  # and scale it alone
        scaled = short_list(factors)[: turned // 4]
        if not scaled or len(scaled) != turned // 4:
            raise metadata.refusal(
                f"its list of rotary factors is no list for heads of which {turned} numbers turn"
            )
        rope["full_attention"] = factored(scaled, theta, config)
    for kind, share in (("full_attention", turned / 2), ("sliding_attention", turned)):
        rope[kind] = {**rope[kind], "partial_rotary_factor": share / size}
    return {
        "layer_types": types,
        "num_attention_heads": queries,
        "num_sliding_attention_heads": heads.get("sliding_attention", queries),
        "num_key_value_heads": keys[0],
        "rope_parameters": rope,
        "swiglu_limits": metadata.each_number("swiglu_clamp_exp", whole, 0.0),
        "swiglu_limits_shared": metadata.each_number("swiglu_clamp_shexp", whole, 0.0),
        **sparse_layers(file, metadata, config),
    }


def nemotron(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """The epsilon of its norms."""
    return {"norm_eps": metadata.number("attention.layer_norm_epsilon")}


def exaone_moe(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Windows, and which layers have experts."""
    return {**windows(4)(file, metadata, config), **sparse_layers(file, metadata, config)}


def mellum(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Windows, and their rotary base."""
    base = config["rope_parameters"]["rope_theta"]
    return {**windows(4)(file, metadata, config),
            "rope_parameters": _two_bases(metadata, config, base)}  # fmt: skip


def cohere2moe(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Windows, the router, and the layers in front that have no experts."""
    sigmoid = metadata.whole("expert_gating_func", _SIGMOID) == _SIGMOID
    return {
        **windows(4)(file, metadata, config),
        "expert_selection_fn": "sigmoid" if sigmoid else "softmax",
        "prefix_dense_intermediate_size": config["intermediate_size"],
        "intermediate_size": metadata.whole("expert_feed_forward_length"),
        **dense_first(file, metadata, config),
    }


def dbrx(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Its config has parts of their own for attention and experts."""
    return {
        "d_model": config["hidden_size"],  # transformers reads it before its other name
        "attn_config": {
            "kv_n_heads": config["num_key_value_heads"],
            "clip_qkv": metadata.number("attention.clamp_kqv", 0.0) or None,
            "rope_theta": config["rope_parameters"]["rope_theta"],
        },
        "ffn_config": {
            "ffn_hidden_size": config["intermediate_size"],
            "moe_num_experts": metadata.counted("expert_count", "experts", expert_count(file)),
            "moe_top_k": metadata.whole("expert_used_count"),
        },
    }


def gemma3n(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Windows, embeddings of each layer, and how sparse the first layers' activations are."""
    layers = _layers_of(config)
    table = file.tensors.get("per_layer_token_embd.weight")
    left = file.tensors.get("blk.0.laurel_l.weight")
    if table is None or left is None or len(table.shape) != 2 or len(left.shape) != 2:
        raise metadata.refusal("it has no 'per_layer_token_embd' or no 'laurel_l'")
    cuts = metadata.each_number("activation_sparsity_scale", layers)
    active, streams = metadata.whole("altup.active_idx"), metadata.whole("altup.num_inputs")
    if active >= streams:
        raise metadata.refusal(f"of its {streams} streams number {active} is active")
    return {
        "layer_types": _layer_types(metadata, config, every=5),
        "intermediate_size": metadata.each("feed_forward_length", layers),
        "num_kv_shared_layers": metadata.whole("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": metadata.whole("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table.shape[0],
        "laurel_rank": left.shape[0],
        # of a normal distribution, the share below so many deviations
        "activation_sparsity_pattern": [round((1 + erf(cut / sqrt(2))) / 2, 4) for cut in cuts],
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "rope_parameters": _two_bases(metadata, config, 10000.0),
    }


def gemma4(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Layers with windows, and those without, which have other heads."""
    experts: Config = {}
    if metadata.whole("expert_count", 0):
        experts = {
            "enable_moe_block": True,
            "num_experts": metadata.counted("expert_count", "experts", expert_count(file)),
            "top_k_experts": metadata.whole("expert_used_count"),
            "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        }
    types = _layer_types(metadata, config, every=6)
    shared = metadata.whole("attention.shared_kv_layers", 0)
    heads = metadata.each("attention.head_count_kv", _layers_of(config))
    widths = metadata.each("feed_forward_length", _layers_of(config))
    whole = [n for n, kind in enumerate(types) if kind == "full_attention"]
    local = [n for n in range(len(types)) if n not in whole]
    own = [n for n in whole if n < _layers_of(config) - shared]  # those with keys of their own
    # the file has a factor for each frequency, so large that it stands still, or 1
    factors = config["rope_parameters"].get("long_factor", [1.0])
    turned = sum(factor < _STILL for factor in factors) / len(factors)
    return {
        **experts,
        "layer_types": types,
        "head_dim": metadata.whole("attention.key_length_swa"),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": heads[local[0]] if local else heads[0],
        "num_global_key_value_heads": heads[whole[0]] if whole else None,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": metadata.whole("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "intermediate_size": widths[0],
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        "attention_k_eq_v": any(f"blk.{n}.attn_v.weight" not in file.tensors for n in own),
        "rope_parameters": {
            **_two_bases(metadata, config, 10000.0),
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": turned,
                "rope_theta": config["rope_parameters"]["rope_theta"],
            },
        },
    }  # fmt: skip
