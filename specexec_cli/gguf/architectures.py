"""What each architecture of GGUF files is called in transformers, and what its metadata mean there.

Values that no file has are as in llama.cpp's src/models (ggml-org/llama.cpp, b11549), by the names
of its architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specexec_cli.gguf import own_hybrids as hybrid
from specexec_cli.gguf import own_values as own
from specexec_cli.gguf.container import GgufFile
from specexec_cli.gguf.counts import expert_count
from specexec_cli.gguf.metadata import Metadata
from specexec_cli.gguf.own_values import Config, Own

_EPSILON = "attention.layer_norm_rms_epsilon"
_LAYER_NORM = "attention.layer_norm_epsilon"
_WINDOW = {"attention.sliding_window": "sliding_window"}
# the numbers among the values; all others are whole
_NUMBERS = ("epsilon", "scale", "clamp_kqv", "softcapping")
_FLAGS = ("expert_weights_norm", "use_parallel_residual")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """An architecture of GGUF files in transformers' terms."""

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)  # keys that a file may lack -> config's
    norm: str | None = "rms_norm_eps"  # config's name of the norms' epsilon
    experts: str = ""  # config's name of the number of experts, if there are any
    fixed: Mapping[str, Any] = field(default_factory=dict)  # the same for every file
    biases: Mapping[str, str] = field(default_factory=dict)  # config's name -> tensor that tells
    # whether a part of a head may be turned by its position
    rotary: Literal["whole heads", "parts of heads", "its own"] = "whole heads"
    uneven: bool = False  # whether heads and widths of MLPs may differ between layers
    attends: bool = True  # whether any layer has heads of attention
    own: Own | None = None  # what the table cannot say
    without: tuple[str, ...] = ()  # values that transformers' config has no place for
    sees: bool = False  # whether transformers has text only as a part of a model that sees

    def values(self, file: GgufFile, metadata: Metadata) -> Config:
        """The values that the table alone tells."""
        config: Config = {**self.fixed}
        if self.norm is not None:
            key = _EPSILON if self.norm.startswith("rms") else _LAYER_NORM
            config[self.norm] = metadata.number(key)
        if self.experts:
            config[self.experts] = metadata.counted("expert_count", "experts", expert_count(file))
        for key, name in self.keys.items():
            if metadata.value(key) is not None:
                config[name] = _value(metadata, key)
        config |= {name: tensor in file.tensors for name, tensor in self.biases.items()}
        return config


def _value(metadata: Metadata, key: str) -> Any:
    if key.endswith(_FLAGS):
        return metadata.flag(key)
    return metadata.number(key) if key.endswith(_NUMBERS) else metadata.whole(key)


_USED = {"expert_used_count": "num_experts_per_tok"}
_MIXTURE = {**_USED, "expert_feed_forward_length": "moe_intermediate_size"}
_NORMALIZED = {"expert_weights_norm": "norm_topk_prob"}
_ROUTED = {
    **_MIXTURE, **_NORMALIZED, "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
}  # fmt: skip
_GRANITE = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_NEMOTRON_H = {
    "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
}  # fmt: skip
_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_BIASES = {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"}
_BIASES_EACH = {**_BIASES, "attention_out_bias": "blk.0.attn_output.bias"}


ARCHITECTURES: Mapping[str, Described] = {
    "llama": Described(model_type="llama", own=own.llama,
                       biases={**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"}),
    "qwen2": Described(model_type="qwen2"),
    "qwen2vl": Described(model_type="qwen2"),  # of models that see, files hold the part for text
    "qwen2moe": Described(
        model_type="qwen2_moe", experts="num_experts", fixed={"norm_topk_prob": False},
        keys={**_MIXTURE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3": Described(model_type="qwen3"),
    "qwen3vl": Described(model_type="qwen3"),
    "qwen3vlmoe": Described(
        model_type="qwen3_moe", experts="num_experts", keys=_MIXTURE,
        fixed={"norm_topk_prob": True},
    ),
    "qwen35": Described(
        model_type="qwen3_5_text", rotary="parts of heads", keys=hybrid.DELTA_NET, uneven=True,
        own=hybrid.delta_net,
    ),
    "qwen35moe": Described(
        model_type="qwen3_5_moe_text", rotary="parts of heads", uneven=True, experts="num_experts",
        keys={**hybrid.DELTA_NET, **_MIXTURE,
              "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        own=hybrid.delta_net,
    ),
    "qwen3next": Described(
        model_type="qwen3_next", rotary="parts of heads", uneven=True, experts="num_experts",
        keys={**hybrid.DELTA_NET, **_MIXTURE,
              "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
        own=hybrid.delta_net,
    ),
    "qwen3moe": Described(
        model_type="qwen3_moe", experts="num_experts", keys=_MIXTURE,
        fixed={"norm_topk_prob": True},  # llama.cpp normalizes, whatever the model's config says
    ),
    "gemma": Described(model_type="gemma"),
    "gemma2": Described(model_type="gemma2", own=own.gemma2),
    "gemma3": Described(model_type="gemma3_text", own=own.gemma3),
    "gemma3n": Described(model_type="gemma3n_text", keys={
        **_WINDOW, "altup.active_idx": "altup_active_idx", "altup.num_inputs": "altup_num_inputs"},
        own=own.gemma3n, uneven=True),
    "gemma4": Described(model_type="gemma4_text", keys=_WINDOW, own=own.gemma4, uneven=True),
    "phi2": Described(
        model_type="phi", norm="layer_norm_eps", rotary="parts of heads",
        own=own.feed_forward_as_stored,
    ),
    "phi3": Described(model_type="phi3", rotary="its own", own=own.phi3),
    "phimoe": Described(
        model_type="phimoe", experts="num_local_experts", keys=_USED, own=own.phimoe,
        biases={**_ATTENTION_BIAS, "lm_head_bias": "output.bias"},
    ),
    "gpt-oss": Described(model_type="gpt_oss", experts="num_local_experts", keys=_USED,
                         biases=_ATTENTION_BIAS, own=own.gpt_oss),
    "apertus": Described(model_type="apertus", biases=_ATTENTION_BIAS),
    "arcee": Described(model_type="arcee", biases=_BIASES),
    "afmoe": Described(
        model_type="afmoe", experts="num_experts", fixed={"mup_enabled": True}, own=own.windows(4),
        keys={**_MIXTURE, **_WINDOW, "expert_shared_count": "num_shared_experts",
              "leading_dense_block_count": "num_dense_layers",
              "expert_weights_scale": "route_scale", "expert_weights_norm": "route_norm"},
    ),
    "command-r": Described(
        model_type="cohere", norm="layer_norm_eps", keys={"logit_scale": "logit_scale"},
        biases={"use_qk_norm": "blk.0.attn_q_norm.weight", **_ATTENTION_BIAS},
    ),
    "cohere2": Described(
        model_type="cohere2", norm="layer_norm_eps", own=own.windows(4),
        keys={"logit_scale": "logit_scale", **_WINDOW}, biases=_ATTENTION_BIAS,
    ),
    "cohere2moe": Described(
        model_type="cohere2_moe", norm="layer_norm_eps", own=own.cohere2moe, experts="num_experts",
        keys={"logit_scale": "logit_scale", **_WINDOW, **_USED, **_NORMALIZED,
              "expert_shared_count": "num_shared_experts"},
        biases=_ATTENTION_BIAS,
    ),
    "dbrx": Described(model_type="dbrx", norm=None, own=own.dbrx, without=("head_dim",)),
    "deepseek2": Described(model_type="deepseek_v2", keys=_ROUTED, rotary="its own",
                           own=own.deepseek2),
    "deepseek32": Described(model_type="deepseek_v32", experts="n_routed_experts", keys=_ROUTED,
                            rotary="its own", own=own.indexed_attention),
    "dots1": Described(model_type="dots1", experts="n_routed_experts", keys=_ROUTED,
                       own=own.dense_first),
    "ernie4_5": Described(model_type="ernie4_5", biases={"use_bias": "blk.0.attn_q.bias"}),
    "ernie4_5-moe": Described(
        model_type="ernie4_5_moe", experts="moe_num_experts", own=own.sparse_layers,
        biases={"use_bias": "blk.0.attn_q.bias"},
        keys={"expert_used_count": "moe_k", "expert_shared_count": "moe_num_shared_experts",
              "expert_feed_forward_length": "moe_intermediate_size",
              "leading_dense_block_count": "moe_layer_start_index",
              "interleave_moe_layer_step": "moe_layer_interval"},
    ),
    "exaone4": Described(model_type="exaone4", keys=_WINDOW, own=own.windows(4)),
    "exaone-moe": Described(
        model_type="exaone_moe", experts="num_experts", own=own.exaone_moe,
        keys={**_ROUTED, **_WINDOW, "expert_shared_count": "num_shared_experts"},
    ),
    "falcon-h1": Described(
        model_type="falcon_h1", fixed={"mamba_norm_before_gate": False}, own=hybrid.falcon_h1,
    ),
    "falcon": Described(
        model_type="falcon", norm="layer_norm_epsilon", own=own.falcon, without=("head_dim",),
        biases={"bias": "blk.0.attn_qkv.bias"}, fixed={"alibi": False},
    ),
    "chatglm": Described(model_type="glm", rotary="parts of heads",
                         biases=_ATTENTION_BIAS),
    "glm4": Described(model_type="glm4", rotary="parts of heads", biases=_ATTENTION_BIAS),
    "glm4moe": Described(
        model_type="glm4_moe", rotary="parts of heads", experts="n_routed_experts", keys=_ROUTED,
        biases={**_ATTENTION_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
        own=own.dense_first,
    ),
    "glm-dsa": Described(model_type="glm_moe_dsa", experts="n_routed_experts", keys=_ROUTED,
                         rotary="its own", own=own.indexed_attention),
    "gpt2": Described(model_type="gpt2", norm="layer_norm_epsilon", own=own.feed_forward_as_stored),
    "starcoder": Described(model_type="gpt_bigcode", norm="layer_norm_epsilon",
                           own=own.feed_forward_as_stored),
    "gptneox": Described(
        model_type="gpt_neox", norm="layer_norm_eps", rotary="parts of heads",
        keys={"use_parallel_residual": "use_parallel_residual"},
        biases={"attention_bias": "blk.0.attn_qkv.bias"},
    ),
    "granite": Described(model_type="granite", keys=_GRANITE, biases=_BIASES,
                         own=own.granite),
    "granite_swa": Described(model_type="granite_swa", keys={**_GRANITE, **_WINDOW}, biases=_BIASES,
                             own=own.granite_swa),
    "granitemoe": Described(
        model_type="granitemoe", keys={**_USED, **_GRANITE}, experts="num_local_experts",
        biases=_ATTENTION_BIAS, own=own.granitemoe,
    ),
    "granitehybrid": Described(
        model_type="granitemoehybrid", keys=_GRANITE, uneven=True, own=hybrid.granite_hybrid,
        rotary="its own",
    ),
    "hunyuan-dense": Described(model_type="hunyuan_v1_dense", biases=_ATTENTION_BIAS),
    "hunyuan_vl": Described(  # the part for text
        model_type="hunyuan_v1_dense", biases=_ATTENTION_BIAS, own=own.hunyuan_vl,
    ),
    "hunyuan-moe": Described(model_type="hunyuan_v1_moe", experts="num_experts",
                             keys={"expert_used_count": "moe_topk"}, biases=_ATTENTION_BIAS),
    "hy_v3": Described(
        model_type="hy_v3", experts="num_experts",
        keys={**_MIXTURE, "expert_weights_scale": "router_scaling_factor"}, own=own.sparse_layers,
    ),
    "jais2": Described(model_type="jais2", norm="layer_norm_eps"),
    "kimi-linear": Described(
        model_type="kimi_linear", rotary="its own", uneven=True, experts="num_experts",
        keys={**_MIXTURE, "ssm.conv_kernel": "linear_conv_kernel_dim",
              "kda.head_dim": "linear_head_dim", "expert_shared_count": "num_shared_experts",
              "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm":
              "norm_topk_prob", "expert_group_count": "n_group",
              "expert_group_used_count": "topk_group"},
        own=hybrid.kimi_linear, without=("rope_parameters",),
    ),
    "laguna": Described(
        model_type="laguna", rotary="its own", uneven=True, experts="num_experts",
        keys={**_MIXTURE, **_WINDOW, "expert_weights_scale": "moe_routed_scaling_factor",
              "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        biases=_ATTENTION_BIAS, own=own.laguna,
    ),
    "lfm2": Described(
        model_type="lfm2", norm=None, keys={"shortconv.l_cache": "conv_L_cache"}, uneven=True,
        own=hybrid.lfm2,
    ),
    "lfm2moe": Described(
        model_type="lfm2_moe", norm=None, uneven=True, experts="num_experts",
        keys={**_MIXTURE, "shortconv.l_cache": "conv_L_cache",
              "leading_dense_block_count": "num_dense_layers",
              "expert_weights_scale": "routed_scaling_factor"},
        own=hybrid.lfm2_moe,
    ),
    "jamba": Described(model_type="jamba", uneven=True, keys=_USED, own=hybrid.jamba,
                       without=("rope_parameters",)),
    "mamba": Described(
        model_type="mamba", norm=None, attends=False, own=hybrid.mamba, keys={
            **hybrid.OF_STATES, "ssm.time_step_rank": "time_step_rank"},
        without=("num_attention_heads",),
    ),
    "mamba2": Described(
        model_type="mamba2", norm=None, attends=False, own=hybrid.mamba2,
        keys={**hybrid.OF_STATES, "ssm.group_count": "n_groups"}, without=("num_attention_heads",),
    ),
    "llama4": Described(model_type="llama4_text", experts="num_local_experts", keys=_USED,
                        own=own.llama4),
    "mellum": Described(model_type="mellum", experts="num_experts", own=own.mellum,
                        keys={**_MIXTURE, **_WINDOW}),
    "mimo2": Described(
        model_type="mimo_v2_flash", rotary="its own", uneven=True, experts="n_routed_experts",
        keys=_ROUTED, own=own.mimo2,
    ),
    "minicpm3": Described(model_type="minicpm3", rotary="its own", own=own.minicpm3),
    "minimax-m2": Described(
        model_type="minimax_m2", rotary="parts of heads", experts="num_local_experts", keys=_USED,
    ),
    "mistral4": Described(model_type="mistral4", experts="n_routed_experts", keys=_ROUTED,
                          rotary="its own", own=own.mistral4),
    "mistral3": Described(model_type="ministral3", own=own.mistral3),
    "muse-glimmer": Described(
        model_type="muse_glimmer", sees=True, own=own.muse_glimmer,
        keys={**_WINDOW, "logit_scale": "output_multiplier",
              "final_logit_softcapping": "final_logit_softcapping"},
    ),
    "nemotron": Described(model_type="nemotron", norm=None, rotary="parts of heads",
                          own=own.nemotron),
    "nemotron_h": Described(
        model_type="nemotron_h", norm="layer_norm_epsilon", keys=_NEMOTRON_H, uneven=True,
        own=hybrid.nemotron_h, without=("rope_parameters",),
    ),
    "nemotron_h_moe": Described(
        model_type="nemotron_h", norm="layer_norm_epsilon", keys={**_NEMOTRON_H, **_ROUTED,
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "moe_latent_size": "moe_latent_size"}, uneven=True,
        own=hybrid.nemotron_h, without=("rope_parameters",),
    ),
    "olmo": Described(model_type="olmo", norm=None, keys={"attention.clamp_kqv": "clip_qkv"}),
    "olmo2": Described(model_type="olmo2", own=own.olmo2),
    "olmoe": Described(
        model_type="olmoe", experts="num_experts", fixed={"norm_topk_prob": False},
        keys={**_USED, "attention.clamp_kqv": "clip_qkv"},
    ),
    # its part for text is as Seed-OSS
    "paddleocr": Described(model_type="seed_oss", biases=_BIASES_EACH),
    "seed_oss": Described(model_type="seed_oss", biases=_BIASES_EACH),
    "smollm3": Described(model_type="smollm3", biases=_BIASES),
    "stablelm": Described(
        model_type="stablelm", norm="layer_norm_eps", rotary="parts of heads",
        keys={"use_parallel_residual": "use_parallel_residual"},
        biases={"use_qkv_bias": "blk.0.attn_q.bias", "qk_layernorm": "blk.0.attn_q_norm.weight"},
    ),
    "starcoder2": Described(model_type="starcoder2", norm="norm_epsilon",
                            biases={"use_bias": "blk.0.attn_q.bias"}),
    "step35": Described(
        model_type="step3p7", sees=True, rotary="its own", uneven=True, experts="n_routed_experts",
        keys={**_MIXTURE, **_WINDOW, "expert_shared_feed_forward_length": "share_expert_dim",
              "expert_weights_scale": "moe_router_scaling_factor"},
        own=own.step35,
    ),
}  # fmt: skip

_HYPER_CONNECTIONS = (
    "its tensors of hyper-connections, which mix several residual streams, are not read from them"
)
# Why files of an architecture are not read although its type runs, for people
NOT_READ: Mapping[str, str] = {
    "bitnet": "llama.cpp's converter rounds its weights, and llama.cpp computes it with SiLU where "
              "the published model squares a ReLU",
    "chameleon": "llama.cpp's converter keeps the norm of one head for all heads",
    "glm5-next": _HYPER_CONNECTIONS,
    "hy_v4": _HYPER_CONNECTIONS,
}  # fmt: skip
