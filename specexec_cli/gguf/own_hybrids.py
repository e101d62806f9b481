"""Values of transformers' configs for models that have recurrent layers beside those that attend.

Which layers are recurrent follows from the tensors that they have. Values that no file has are as
in llama.cpp's src/models (ggml-org/llama.cpp, b11549).
"""

from __future__ import annotations

from math import prod

from specexec_cli.gguf.container import GgufFile
from specexec_cli.gguf.counts import expert_count, layers_with
from specexec_cli.gguf.metadata import Metadata
from specexec_cli.gguf.own_values import Config, granite, latent_attention, sparse_layers

# metadata of layers with a Gated DeltaNet, and transformers' names
DELTA_NET = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
}  # fmt: skip
# of models that are layers with states of Mamba alone
OF_STATES = {"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size"}
_MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups", "ssm.time_step_rank": "mamba_n_heads",
}  # fmt: skip


def _layer_types(file: GgufFile, config: Config, part: str, kind: str) -> list[str]:
    """Each layer's kind: `kind` where it has a part, and attention otherwise."""
    recurrent = layers_with(file, part)
    layers = range(int(config["num_hidden_layers"]))
    return [kind if layer in recurrent else "full_attention" for layer in layers]


def _key_heads(metadata: Metadata, config: Config) -> Config:
    """Heads of keys and values in the layers that attend; files say 0 for all others."""
    layers = int(config["num_hidden_layers"])
    return {"num_key_value_heads": max(metadata.each("attention.head_count_kv", layers))}


def _head_size(metadata: Metadata) -> int:
    """The size of a recurrent layer's heads.

    Raises:
        CheckpointError: the metadata's numbers of heads do not go together.
    """
    heads, groups = metadata.whole("ssm.time_step_rank"), metadata.whole("ssm.group_count")
    inner = metadata.whole("ssm.inner_size")
    if not heads or not groups or heads % groups or inner % heads:
        raise metadata.refusal(
            f"its metadata say that {heads} heads of a recurrent layer, in {groups} groups, have "
            f"{inner} numbers"
        )
    return inner // heads


def _times_as_wide(metadata: Metadata, config: Config) -> int:
    """How many times wider than the rows a recurrent layer is.

    Raises:
        CheckpointError: it is not a whole number of times wider.
    """
    inner, hidden = metadata.whole("ssm.inner_size"), int(config["hidden_size"])
    if not hidden or inner % hidden:
        raise metadata.refusal(f"its recurrent layers are {inner} wide, its rows {hidden}")
    return inner // hidden


def _has(file: GgufFile, tensor: str) -> bool:
    """Whether any layer has a tensor, such as `ssm_conv1d.bias`."""
    return any(name.endswith(f".{tensor}") for name in file.tensors)


def delta_net(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Qwen3-Next and Qwen3.5: heads of values, and which layers are recurrent."""
    keys = metadata.whole("ssm.state_size")
    if not keys:
        raise metadata.refusal("its metadata say that keys of a recurrent layer have 0 numbers")
    return {
        "linear_key_head_dim": keys,
        "linear_value_head_dim": _head_size(metadata),
        "layer_types": _layer_types(file, config, "ssm_conv1d", "linear_attention"),
        **_key_heads(metadata, config),
    }


def granite_hybrid(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Granite 4: its Mamba-2 layers, and experts if there are any. Bamba, which turns heads by
    their positions, has its name."""
    size, times = _head_size(metadata), _times_as_wide(metadata, config)
    own: Config = {name: metadata.whole(key) for key, name in _MAMBA.items()}
    own |= {
        **_key_heads(metadata, config), "mamba_d_head": size, "mamba_expand": times,
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
    }  # fmt: skip
    rope = config["rope_parameters"]
    if metadata.value("rope.scaling.finetuned") is True:
        turned = metadata.whole("rope.dimension_count", config["head_dim"])
        rope = {**rope, "partial_rotary_factor": turned / max(1, config["head_dim"])}
        attends = sorted(layers_with(file, "attn_q"))
        return {**own, "model_type": "bamba", "rope_parameters": rope,
                "attn_layer_indices": attends}  # fmt: skip
    experts = metadata.whole("expert_count", 0)
    if experts:
        experts = metadata.counted("expert_count", "experts", expert_count(file))
    return {
        **own, **granite(file, metadata, config),
        "layer_types": _layer_types(file, config, "ssm_conv1d", "linear_attention"),
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.whole("expert_used_count") if experts else 0,
        "shared_intermediate_size": metadata.whole(
            "expert_shared_feed_forward_length", config["intermediate_size"]
        ),
        "position_embedding_type":
            "rope" if metadata.value("rope.scaling.finetuned") is None else "nope",
    }  # fmt: skip


def falcon_h1(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Falcon-H1, whose multipliers the converter put into the weights."""
    own: Config = {name: metadata.whole(key) for key, name in _MAMBA.items()}
    return {
        **own,
        "mamba_d_head": _head_size(metadata), "mamba_d_ssm": metadata.whole("ssm.inner_size"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
    }  # fmt: skip


def nemotron_h(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Nemotron-H: layers of a Mamba-2, of attention, of an MLP or of experts alone."""
    layers = range(int(config["num_hidden_layers"]))
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe"}
    found = {layer: kind for part, kind in kinds.items() for layer in layers_with(file, part)}
    own: Config = {
        "mamba_num_heads": metadata.whole("ssm.time_step_rank"),
        "mamba_head_dim": _head_size(metadata),
        "layers_block_type": [found.get(layer, "mlp") for layer in layers],
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
        "use_bias": _has(file, "ssm_in.bias"),
        "mlp_bias": _has(file, "ffn_up.bias"),
        "attention_bias": _has(file, "attn_q.bias"),
        **_key_heads(metadata, config),
        "intermediate_size": max(metadata.each("feed_forward_length", len(layers))),
    }
    if "moe" in found.values():
        own["n_routed_experts"] = metadata.counted("expert_count", "experts", expert_count(file))
    return own


def lfm2(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """LFM2: which layers have a short convolution in place of attention."""
    if metadata.whole("attention.sliding_window", 0):
        raise metadata.refusal("windows of LFM2 are not supported")
    return {
        **_key_heads(metadata, config),
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "conv_bias": _has(file, "shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": _layer_types(file, config, "shortconv.conv", "conv"),
    }


def lfm2_moe(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """LFM2 with experts, of which a bias says which are chosen."""
    return {
        **lfm2(file, metadata, config), "use_expert_bias": _has(file, "exp_probs_b.bias"),
        "norm_topk_prob": True,
    }  # fmt: skip


def mamba(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Mamba-1, or Falcon-Mamba, which has norms without weights; layers of nothing else."""
    said = metadata.value("ssm.dt_b_c_rms") is not None
    normed = said and metadata.flag("ssm.dt_b_c_rms")
    return {
        "model_type": "falcon_mamba" if normed else "mamba", **_of_states(file, metadata, config)
    }  # fmt: skip


def mamba2(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Mamba-2: layers of nothing else."""
    return {
        **_of_states(file, metadata, config),
        "num_heads": metadata.whole("ssm.time_step_rank"), "head_dim": _head_size(metadata),
    }  # fmt: skip


def _of_states(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    return {
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "expand": _times_as_wide(metadata, config),
        "intermediate_size": metadata.whole("ssm.inner_size"),
        "use_conv_bias": _has(file, "ssm_conv1d.bias"), "use_bias": _has(file, "ssm_in.bias"),
    }  # fmt: skip


def jamba(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Jamba: which layers attend and which have experts, both at equal distances."""
    attends, offset = _every(file, metadata, config, "attn_q")
    sparse, first = _every(file, metadata, config, "ffn_down_exps")
    own: Config = {
        "attn_layer_period": attends, "attn_layer_offset": offset, "expert_layer_period": sparse,
        "expert_layer_offset": first, "num_experts": 1, **_key_heads(metadata, config),
        "mamba_expand": _times_as_wide(metadata, config),
        "mamba_d_conv": metadata.whole("ssm.conv_kernel"),
        "mamba_d_state": metadata.whole("ssm.state_size"),
        "mamba_dt_rank": metadata.whole("ssm.time_step_rank"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
    }  # fmt: skip
    if layers_with(file, "ffn_down_exps"):
        own["num_experts"] = metadata.counted("expert_count", "experts", expert_count(file))
    return own


def _every(file: GgufFile, metadata: Metadata, config: Config, part: str) -> tuple[int, int]:
    """The distance between layers that have a part, and the number of the first of them.

    Raises:
        CheckpointError: the distances differ.
    """
    layers = int(config["num_hidden_layers"])
    found = sorted(layers_with(file, part)) or [layers]
    period = found[1] - found[0] if len(found) > 1 else max(layers, found[0] + 1)
    if found[:1] != [layers] and found != list(range(found[0], layers, period)):
        raise metadata.refusal(f"its layers with '{part}' are not equally far apart")
    return period, found[0]


def kimi_linear(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    """Kimi-Linear: layers with a Kimi Delta Attention, and those with latent attention."""
    kernel, size = metadata.whole("ssm.conv_kernel"), metadata.whole("kda.head_dim")
    numbers = kernel * size * config["num_attention_heads"]
    for name, tensor in file.tensors.items():
        if ".ssm_conv1d_" in name and (tensor.shape[-1:], prod(tensor.shape)) != (
            (kernel,),
            numbers,
        ):
            raise metadata.refusal(
                f"'{name}' has shape {list(tensor.shape)}, where {kernel} rows are convolved"
            )
    queries, keys, values = (layers_with(file, f"ssm_conv1d_{part}") for part in "qkv")
    if not queries == keys == values:
        raise metadata.refusal("a layer lacks one of 'ssm_conv1d_q', '_k' and '_v'")
    return {
        **latent_attention(metadata, config), **sparse_layers(file, metadata, config),
        "linear_num_heads": config["num_attention_heads"],
        "layer_types": _layer_types(file, config, "ssm_conv1d_q", "linear_attention"),
    }  # fmt: skip
