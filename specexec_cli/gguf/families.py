"""How each model family's tensors are called in GGUF files, and what the converter changed in them.

Only what differs from Llama is stated. Names are those of `MODEL_TENSORS` in gguf-py's constants.py
and changes those of the folder conversion/ (ggml-org/llama.cpp, b11549);
tests/e2e/test_gguf_converted.py holds each family to files that llama.cpp's own converter wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# Orders of a linear's rows that are not transformers':
#   pairs   both halves of a rotary pair side by side (queries and keys)
#   halves  all first halves of rotary pairs, then all second ones, where transformers has pairs
#   thirds  all queries, then all keys, then all values, where each head has its own three together
#   groups  as thirds, where each group of heads has its queries, its key and its value together
#   tiles   of value heads that share key heads: the first of every key head, then the second
#   columns the inputs of a linear in the order of tiles
RowOrder = Literal["pairs", "halves", "thirds", "groups", "tiles", "columns"]
# Ways to make a parameter of tensors; made_of in models/restored.py carries them out
Making = Literal[
    "transposed", "flat", "flat_transposed", "gate_up", "gate_up_transposed", "latent", "same",
    "columns", "qkvz",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """A parameter that is made of one or more of a layer's tensors, which have other shapes."""

    how: Making
    parts: tuple[str, ...]  # llama.cpp's names within a layer


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture's tensors differ from Llama's."""

    inside: Mapping[str, str] = field(default_factory=dict)  # parts of a layer with other names
    outside: Mapping[str, str] = field(default_factory=dict)  # other names, outside the layers
    stacks: Mapping[str, str] = field(default_factory=dict)  # several linears' matrices in one
    layers: str = "model.layers"
    experts: str = "mlp.experts"  # the module of a layer's experts
    rows: Mapping[str, RowOrder] = field(default_factory=dict)  # part of a layer -> order of rows
    # the same for models whose positions have several axes, as those that see have
    rows_of_axes: Mapping[str, RowOrder] = field(default_factory=dict)
    norms_plus_one: str = ""  # how the names of norms end whose weights are stored plus one
    two_norms: Mapping[str, str] = field(default_factory=dict)  # names where there is attn_norm_2
    made: Mapping[str, Made] = field(default_factory=dict)  # parameter within a layer -> its parts
    # metadata's key -> a layer's parameter of one number, which has no tensor
    constants: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # parts of a layer that its config says, or that no pass needs
    # part of a layer -> its parameter's shape, where the file has other dimensions; -1 is the rest
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


_PAIRS: Mapping[str, RowOrder] = {"attn_q": "pairs", "attn_k": "pairs"}
_AROUND = {  # norms in front of and behind each block
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# embeddings that Gemma 3n and Gemma 4 have for each layer
_EACH_LAYER = {"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
               "post_norm": "post_per_layer_input_norm"}  # fmt: skip
_EACH_LAYER_OUTSIDE = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
# and the linears around an assistant's layers
_GEMMA4_OUTSIDE = {
    **_EACH_LAYER_OUTSIDE, "nextn.pre_projection": "pre_projection",
    "nextn.post_projection": "post_projection",
}  # fmt: skip
_BEHIND = {**_AROUND, "attn_norm": "", "ffn_norm": ""}  # norms behind each block alone
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_ONE_SHARED = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_CORRECTED = {**_SHARED, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
# of models that see
_SEEING_OUTSIDE = {
    "token_embd": "model.language_model.embed_tokens", "output_norm": "model.language_model.norm",
}  # fmt: skip
_FINAL_NORM = {"output_norm": "model.final_layernorm"}
_FULLY_CONNECTED = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
}  # fmt: skip
_LATENT_PARTS = {"self_attn.kv_b_proj.weight": Made("latent", ("attn_k_b", "attn_v_b"))}
# and an index by which layers pick the tokens they see: of texts that are read, all
_INDEXED = Family(
    {**_CORRECTED, **_LATENT}, made=_LATENT_PARTS,
    unused=("indexer.attn_k", "indexer.attn_q_b", "indexer.k_norm", "indexer.proj"),
)  # fmt: skip
_GPT2 = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2", **_FULLY_CONNECTED,
}  # fmt: skip
_GPT2_OUTSIDE = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
}  # fmt: skip
_CONV1D = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_NAMES_OF = {name: part for part, name in _GPT2.items()}
_MAMBA2 = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias", "ssm_conv1d": "conv1d",
           "ssm_in": "in_proj", "ssm_norm": "norm", "ssm_out": "out_proj"}  # fmt: skip
_MAMBA = {part: f"mamba.{name}" for part, name in _MAMBA2.items()}
_MIXER = {part: f"mixer.{name}" for part, name in _MAMBA2.items()}
# of Mamba-1, which also makes the width of its steps from its rows
_MAMBA1 = {"ssm_a": "A_log", "ssm_d": "D", "ssm_conv1d": "conv1d", "ssm_in": "in_proj",
           "ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_out": "out_proj"}  # fmt: skip
_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
_ALONE = Family(
    {"attn_norm": "norm", **{part: f"mixer.{name}" for part, name in _MAMBA1.items()}},
    _BACKBONE,
    layers="backbone.layers",
)
# an MLP behind a norm of its own, beside states
_FEED_FORWARD = {
    "ffn_norm": "pre_ff_layernorm", "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
}  # fmt: skip
_DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm", "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
_QWEN35 = {
    **_DELTA_NET, "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
}  # fmt: skip
_TILES: Mapping[str, RowOrder] = {
    "ssm_a": "tiles", "ssm_dt.bias": "tiles", "ssm_conv1d": "tiles", "attn_qkv": "tiles",
    "attn_gate": "tiles", "ssm_alpha": "tiles", "ssm_beta": "tiles", "ssm_out": "columns",
}  # fmt: skip
_COLUMNS = {"linear_attn.out_proj.weight": Made("columns", ("ssm_out",))}
_LFM2 = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
    "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias",
}  # fmt: skip
_LFM2_OUTSIDE = {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}

# by transformers' model_type
FAMILIES: Mapping[str, Family] = {
    "afmoe": Family(
        {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_mlp_layernorm",
         "post_ffw_norm": "post_mlp_layernorm", "attn_gate": "self_attn.gate_proj",
         "ffn_gate_inp": "mlp.router.gate", "exp_probs_b.bias": "mlp.expert_bias", **_SHARED},
    ),
    "apertus": Family(
        {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        constants={f"xielu.{name}": f"mlp.act_fn.{name}"
                   for name in ("alpha_n", "alpha_p", "beta", "eps")},
    ),
    "arcee": Family(rows=_PAIRS),
    "bamba": Family({**_MAMBA, **_FEED_FORWARD}, _FINAL_NORM, rows=_PAIRS),
    "cohere": Family(),
    "cohere2": Family(),
    "cohere2_moe": Family(_SHARED),
    "dbrx": Family(
        {"attn_norm": "norm_attn_norm.norm_1", "attn_output_norm": "norm_attn_norm.norm_2",
         "attn_qkv": "norm_attn_norm.attn.Wqkv", "attn_output": "norm_attn_norm.attn.out_proj",
         "ffn_gate_inp": "ffn.router.layer"},
        {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
        layers="transformer.blocks",
        made={
            "ffn.experts.mlp.w1": Made("flat", ("ffn_gate_exps",)),
            "ffn.experts.mlp.v1": Made("flat", ("ffn_up_exps",)),
            "ffn.experts.mlp.w2": Made("flat_transposed", ("ffn_down_exps",)),
        },
    ),
    "deepseek_v2": Family({**_CORRECTED, **_LATENT}, made=_LATENT_PARTS),
    "deepseek_v3": Family({**_CORRECTED, **_LATENT}, made=_LATENT_PARTS),
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "youtu": Family(_LATENT, made=_LATENT_PARTS),
    "dots1": Family(_CORRECTED),
    "ernie4_5": Family(),
    "ernie4_5_moe": Family(
        {**_SHARED, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
    ),
    "exaone4": Family(_BEHIND),
    "exaone_moe": Family({**_SHARED, "exp_probs_b.bias": "mlp.e_score_correction_bias"}),
    "falcon": Family(
        {"attn_norm": "input_layernorm", "attn_qkv": "self_attention.query_key_value",
         "attn_output": "self_attention.dense", "ffn_up": "mlp.dense_h_to_4h",
         "ffn_down": "mlp.dense_4h_to_h"},
        {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f"},
        layers="transformer.h", rows={"attn_qkv": "groups"},
        two_norms={"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
    ),
    "falcon_mamba": _ALONE,
    "falcon_h1": Family(
        {**_MAMBA, **_FEED_FORWARD, "ffn_norm": "pre_ff_layernorm.weight",
         "ffn_norm.weight": "pre_ff_layernorm.weight"},
        _FINAL_NORM,
    ),
    "gemma": Family(norms_plus_one="norm"),
    "gemma2": Family(_AROUND, norms_plus_one="norm"),
    "gemma3_text": Family(_AROUND, norms_plus_one="norm"),
    "gemma3n_text": Family(
        {**_AROUND, **_EACH_LAYER, "altup_correct_coef": "altup.correction_coefs",
         "altup_correct_scale.weight": "altup.correct_output_scale",
         "altup_predict_coef": "altup.prediction_coefs", "altup_router": "altup.modality_router",
         "altup_router_norm": "altup.router_norm", "laurel_l": "laurel.linear_left",
         "laurel_r": "laurel.linear_right", "laurel_post_norm": "laurel.post_laurel_norm"},
        _EACH_LAYER_OUTSIDE,
        stacks={"altup_proj": "model.altup_projections",
                "altup_unembd_proj": "model.altup_unembed_projections"},
    ),
    "gemma4_text": Family(
        {**_AROUND, **_EACH_LAYER, "layer_output_scale.weight": "layer_scalar",
         "ffn_gate_inp": "router.proj",
         "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
         "post_ffw_norm_1": "post_feedforward_layernorm_1",
         "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
         "post_ffw_norm_2": "post_feedforward_layernorm_2"},
        _GEMMA4_OUTSIDE, experts="experts",
    ),
    "glm": Family(_GATE_UP),
    "glm4": Family(
        {**_GATE_UP, "post_attention_norm": "post_self_attn_layernorm",
         "post_ffw_norm": "post_mlp_layernorm"},
        rows_of_axes={"attn_q": "halves", "attn_k": "halves"},
    ),
    "glm4_moe": Family({**_CORRECTED, "post_attention_norm": "post_attention_layernorm"}),
    "gpt2": Family(
        _GPT2, _GPT2_OUTSIDE, layers="transformer.h",
        made={f"{name}.weight": Made("transposed", (_NAMES_OF[name],)) for name in _CONV1D},
    ),
    "gpt_bigcode": Family(_GPT2, _GPT2_OUTSIDE, layers="transformer.h"),
    "gpt_neox": Family(
        {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
         "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"},
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm",
         "output": "embed_out"},
        layers="gpt_neox.layers", rows={"attn_qkv": "thirds"},
    ),
    "gpt_oss": Family(
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
         "attn_sinks.weight": "self_attn.sinks"},
    ),
    "granite": Family(rows=_PAIRS),
    "granite_swa": Family({"attn_sinks.weight": "self_attn.sinks"}, rows=_PAIRS),
    "granitemoe": Family(
        {"ffn_gate_inp": "block_sparse_moe.router.layer"},
        experts="block_sparse_moe.experts", rows=_PAIRS,
    ),
    "granitemoe_swa": Family(
        {"ffn_gate_inp": "block_sparse_moe.router", "attn_sinks.weight": "self_attn.sinks",
         "ffn_up_shexp": "shared_mlp.input_linear", "ffn_down_shexp": "shared_mlp.output_linear"},
        experts="block_sparse_moe.experts", rows=_PAIRS,
    ),
    "granitemoehybrid": Family(
        {**_MAMBA, "ffn_gate_inp": "block_sparse_moe.router.layer",
         # models without other experts have these under the names of an MLP
         "ffn_gate": "ffn_gate_shexp", "ffn_up": "ffn_up_shexp",
         "ffn_down": "shared_mlp.output_linear", "ffn_down_shexp": "shared_mlp.output_linear"},
        experts="block_sparse_moe.experts", rows=_PAIRS,
        made={"shared_mlp.input_linear.weight":
              Made("gate_up", ("ffn_gate_shexp", "ffn_up_shexp"))},
    ),
    "granitemoeshared": Family(
        {"ffn_gate_inp": "block_sparse_moe.router.layer",
         "ffn_down_shexp": "shared_mlp.output_linear"},
        experts="block_sparse_moe.experts", rows=_PAIRS,
        made={"shared_mlp.input_linear.weight":
              Made("gate_up", ("ffn_gate_shexp", "ffn_up_shexp"))},
    ),
    "hunyuan_v1_dense": Family(
        {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
    ),
    "hunyuan_v1_moe": Family(
        {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
         "ffn_gate_inp": "mlp.gate.wg", "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
         "ffn_up_shexp": "mlp.shared_mlp.up_proj", "ffn_down_shexp": "mlp.shared_mlp.down_proj"},
    ),
    "hy_v3": Family({**_SHARED, "ffn_gate_inp": "mlp.router.gate", "exp_probs_b": "mlp.expert_bias",
                     "exp_probs_b.bias": "mlp.expert_bias"}),
    "jais2": Family(),
    "jamba": Family(
        {**{part: f"mamba.{name}" for part, name in _MAMBA1.items()},
         "ssm_dt_norm": "mamba.dt_layernorm", "ssm_b_norm": "mamba.b_layernorm",
         "ssm_c_norm": "mamba.c_layernorm", **_FEED_FORWARD,
         "ffn_gate_inp": "feed_forward.router"},
        _FINAL_NORM, experts="feed_forward.experts",
    ),
    "kimi_linear": Family(
        {**_CORRECTED, **_LATENT, "ssm_a": "self_attn.A_log", "ssm_dt.bias": "self_attn.dt_bias",
         "ssm_conv1d_q": "self_attn.q_conv1d", "ssm_conv1d_k": "self_attn.k_conv1d",
         "ssm_conv1d_v": "self_attn.v_conv1d", "ssm_beta": "self_attn.b_proj",
         "ssm_norm": "self_attn.o_norm", **{f"ssm_{part}": f"self_attn.{part}_proj"
         for part in ("f_a", "f_b", "g_a", "g_b")}},
        made=_LATENT_PARTS, shapes={"ssm_a": (1, 1, -1, 1)},
    ),
    "laguna": Family({**_ONE_SHARED, "attn_gate": "self_attn.g_proj",
                      "exp_probs_b.bias": "mlp.experts.e_score_correction_bias"}),
    "lfm2": Family(_LFM2, _LFM2_OUTSIDE),
    "lfm2_moe": Family(_LFM2, _LFM2_OUTSIDE, experts="feed_forward.experts"),
    "llama": Family(rows=_PAIRS),
    "llama4_text": Family(
        {"ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
         "ffn_down": "feed_forward.down_proj", "ffn_gate_inp": "feed_forward.router",
         "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
         "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
         "ffn_down_shexp": "feed_forward.shared_expert.down_proj"},
        made={
            "feed_forward.experts.gate_up_proj":
                Made("gate_up_transposed", ("ffn_gate_exps", "ffn_up_exps")),
            "feed_forward.experts.down_proj": Made("transposed", ("ffn_down_exps",)),
        },
    ),
    "mamba": _ALONE,
    "mamba2": Family({**_MIXER, "attn_norm": "norm"}, _BACKBONE, layers="backbone.layers"),
    "mellum": Family(),
    "mimo_v2_flash": Family({"attn_sinks.weight": "self_attn.attention_sink_bias",
                             "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}),
    "minicpm3": Family(_LATENT),
    "minimax_m2": Family({"exp_probs_b.bias": "mlp.e_score_correction_bias"}),
    "ministral3": Family(rows=_PAIRS),
    "mistral4": Family({**_CORRECTED, **_LATENT}, made=_LATENT_PARTS),
    "mixtral": Family(rows=_PAIRS),
    "muse_glimmer": Family(
        {**_AROUND, "attn_gate": "self_attn.gate_proj"}, _SEEING_OUTSIDE,
        layers="model.language_model.layers", rows=_PAIRS, norms_plus_one="layernorm",
        # both made of the config's qk_scale_factor
        unused=("attn_q_norm", "attn_k_norm"),
    ),
    "nemotron": Family(norms_plus_one="norm"),
    "nemotron_h": Family(
        {**_MIXER, "attn_norm": "norm", "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj",
         "attn_v": "mixer.v_proj", "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj",
         "ffn_down": "mixer.down_proj", "ffn_gate_inp": "mixer.gate",
         "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
         "ffn_up_shexp": "mixer.shared_experts.up_proj",
         "ffn_down_shexp": "mixer.shared_experts.down_proj",
         "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj"},
        {"token_embd": "model.embeddings", "output_norm": "model.norm_f"}, rows=_PAIRS,
        made={"mixer.experts.up_proj": Made("same", ("ffn_up_exps",)),
              "mixer.experts.down_proj": Made("same", ("ffn_down_exps",))},
    ),
    "olmo": Family(rows=_PAIRS),
    "olmo2": Family(_BEHIND),
    "olmo3": Family(_BEHIND),
    "olmoe": Family(),
    "phi": Family(
        {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        _FINAL_NORM,
    ),
    "phimoe": Family({"ffn_gate_inp": "mlp.router"}),
    "phi3": Family({"attn_qkv": "self_attn.qkv_proj", **_GATE_UP}),
    "qwen2": Family(),
    "qwen2_moe": Family(_ONE_SHARED),
    "qwen3": Family(),
    "qwen3_5_moe_text": Family(
        {**_QWEN35, **_ONE_SHARED}, rows=_TILES, norms_plus_one="norm", made=_COLUMNS
    ),
    "qwen3_5_text": Family(_QWEN35, rows=_TILES, norms_plus_one="norm", made=_COLUMNS),
    "qwen3_moe": Family(),
    "qwen3_next": Family(
        {**_DELTA_NET, **_ONE_SHARED, "ssm_ba": "linear_attn.in_proj_ba",
         "ssm_in": "linear_attn.in_proj_qkvz"},
        rows={"attn_qkv": "tiles"}, norms_plus_one="norm",
        made={"linear_attn.in_proj_qkvz.weight": Made("qkvz", ("attn_qkv", "attn_gate"))},
    ),
    "seed_oss": Family({"post_attention_norm": "post_attention_layernorm"}),
    "smollm3": Family(rows=_PAIRS),
    "stablelm": Family(),
    "starcoder2": Family(_FULLY_CONNECTED),
    "step3p7": Family(
        {**_CORRECTED, "attn_gate": "self_attn.g_proj"}, _SEEING_OUTSIDE,
        layers="model.language_model.layers", norms_plus_one="norm",
        made={"mlp.experts.gate_up_proj": Made("gate_up", ("ffn_gate_exps", "ffn_up_exps")),
              "mlp.experts.down_proj": Made("same", ("ffn_down_exps",))},
    ),
}  # fmt: skip
