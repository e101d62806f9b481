"""What a decoder layer holds, told from config.json: its matrices, and the weights beside them.

Counts follow transformers' modelling files of each architecture; a test builds the real models and
compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from specexec_cli.catalog.architectures import ARCHITECTURES, Architecture, refusal
from specexec_cli.catalog.conforming import EXPERTS, WITH_LAYERS
from specexec_cli.catalog.packed_formats import PACKED_KINDS
from specexec_cli.catalog.row_bits import packs_experts_alone, row_bits
from specexec_cli.errors import ConfigError
from specexec_cli.planning.config_values import number, part, positive, values


@dataclass(frozen=True, slots=True)
class Linear:
    """Weight matrices of one shape."""

    inputs: int
    outputs: int
    count: int = 1
    active: int = 1  # of `count`, how many a row goes through
    quantized: bool = True  # in a quantized checkpoint
    expert: bool = False  # of the experts that rows are routed to, where they can come one by one


@dataclass(frozen=True, slots=True)
class Shape:
    """config.json's numbers under one set of names."""

    kind: Architecture
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool


def read_shape(config: Mapping[str, Any]) -> Shape:
    """The numbers of a config.json, whatever its architecture calls them.

    Raises:
        ConfigError: the architecture is not known, or a key is missing.
    """
    if not config.get("model_type"):
        raise ConfigError("config.json names no model_type: is it a language model's?")
    name = str(config["model_type"])
    kind = ARCHITECTURES.get(name)
    if kind is None:
        raise ConfigError(f"the model's size cannot be told: {refusal(name)}")

    said = partial(number, config)
    hidden = said("hidden_size", "n_embd")
    heads = said("num_attention_heads", "n_head")
    if name == "gpt_bigcode":
        kv_heads = 1 if config.get("multi_query", True) else heads
    else:
        kv_heads = said("num_key_value_heads", default=kind.default_kv_heads or heads)
    return Shape(
        kind=kind,
        hidden=hidden,
        layers=said("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=said("head_dim", default=kind.default_head_dim or hidden // heads),
        intermediate=said("intermediate_size", "n_inner", default=4 * hidden),
        vocab=said("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", kind.tied_by_default)),
    )


def layer_weights(
    shape: Shape, config: Mapping[str, Any], index: int
) -> tuple[list[Linear], int, int]:
    """One decoder layer.

    Returns:
        its linears, the number of its other weights (norms, biases), and of those of its experts.
    """
    if shape.kind.gemma4:
        return _gemma4_layer(shape, config, index)
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = [
        Linear(shape.hidden, query),
        Linear(shape.hidden, key, 2, 2),
        Linear(query, shape.hidden),
    ]
    biases = of_experts = 0
    others = shape.kind.norms * shape.hidden + (shape.heads if shape.kind.sinks else 0)
    if shape.kind.latent:
        attention, latent_norms = _latent_attention(shape, config)
        others += latent_norms
    if shape.kind.router_bias and index >= number(config, "first_k_dense_replace", default=0):
        others += expert_count(config)
    norms = shape.kind.query_key_norms
    if norms == "one head" or (norms == "as configured" and config.get("use_qk_norm", False)):
        others += 2 * shape.head_dim
    elif norms == "all heads":
        others += query + key
    if shape.kind.biases == "qkv":
        biases += query + 2 * key
    elif shape.kind.biases == "all":
        others += 2 * shape.hidden  # LayerNorm has a bias
        if config.get("use_bias", True):
            biases += query + 2 * key + 2 * shape.hidden + shape.intermediate
    elif shape.kind.biases == "with experts":
        count = expert_count(config)
        of_experts = count * (2 * shape.intermediate + shape.hidden)
        biases += count
        if config.get("attention_bias", True):
            biases += query + 2 * key + shape.hidden
    elif config.get("attention_bias", False):
        output = 0 if shape.kind.biases == "qkv as configured" else shape.hidden
        biases += query + 2 * key + output
    return attention + _mlp(shape, config, index), others + biases, of_experts


def _latent_attention(shape: Shape, config: Mapping[str, Any]) -> tuple[list[Linear], int]:
    """Linears of multi-head latent attention, and the weights of their norms."""
    latent, rotated, value, query = (
        number(config, name)
        for name in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim")
    )
    queries, rank = shape.heads * (query + rotated), number(config, "q_lora_rank", default=0)
    linears = [
        Linear(shape.hidden, latent + rotated),
        Linear(latent, shape.heads * (query + value)),
        Linear(shape.heads * value, shape.hidden),
    ]
    if not rank:
        return [Linear(shape.hidden, queries), *linears], latent
    return [Linear(shape.hidden, rank), Linear(rank, queries), *linears], latent + rank


def _gemma4_layer(
    shape: Shape, config: Mapping[str, Any], index: int
) -> tuple[list[Linear], int, int]:
    """As layer_weights: layers that see all tokens have heads of a size of their own."""
    head_dim, kv_heads, own = _gemma4_heads(shape, config, index)
    linears = [
        Linear(shape.hidden, shape.heads * head_dim),
        Linear(shape.heads * head_dim, shape.hidden),
    ]
    others = 4 * shape.hidden + head_dim + 1  # norms, that of queries, and a factor of the layer
    if own:
        one = bool(config.get("attention_k_eq_v")) and _sees_all(shape, config, index)
        count = 1 if one else 2  # where values are keys there is one matrix for both
        linears.append(Linear(shape.hidden, kv_heads * head_dim, count, count))
        others += head_dim
    wide = 1 if own or not config.get("use_double_wide_mlp") else 2
    linears += _gated(shape, wide * shape.intermediate)
    if each := _per_layer_inputs(config):
        linears += [Linear(shape.hidden, each), Linear(each, shape.hidden)]
        others += shape.hidden
    if config.get("enable_moe_block"):
        experts = expert_count(config)
        width = number(config, "moe_intermediate_size")
        linears.append(Linear(shape.hidden, experts, quantized=False))
        linears += _gated(shape, width, experts, experts_per_row(config), expert=True)
        others += 4 * shape.hidden + experts  # three more norms, and the router's factors
    return linears, others, 0


def _gemma4_heads(shape: Shape, config: Mapping[str, Any], index: int) -> tuple[int, int, bool]:
    """Of a layer the size of a head, its key heads, and whether it has keys of its own."""
    own = index < shape.layers - number(config, "num_kv_shared_layers", default=0)
    if not _sees_all(shape, config, index):
        return shape.head_dim, shape.kv_heads, own
    kv_heads = shape.kv_heads
    if config.get("attention_k_eq_v"):
        kv_heads = positive(config, "num_global_key_value_heads", default=kv_heads)
    return positive(config, "global_head_dim", default=512), kv_heads, own


def _sees_all(shape: Shape, config: Mapping[str, Any], index: int) -> bool:
    """Whether a layer of a Gemma 4 attends to all tokens: the last, and by default each 6th."""
    kinds = values(config, "layer_types")
    if kinds and len(kinds) < shape.layers:
        raise ConfigError(f"config.json has {len(kinds)} layer_types for {shape.layers} layers")
    chosen = kinds[index] == "full_attention" if kinds else index % 6 == 5
    return chosen or index == shape.layers - 1


def _per_layer_inputs(config: Mapping[str, Any]) -> int:
    """Width of what a layer of a Gemma 4 takes of a token's second embedding; 0: none is there."""
    return number(config, "hidden_size_per_layer_input", default=256)


def _gated(
    shape: Shape, width: int, experts: int = 1, active: int = 1, *, expert: bool = False
) -> list[Linear]:
    return [
        Linear(shape.hidden, width, 2 * experts, 2 * active, expert=expert),
        Linear(width, shape.hidden, experts, active, expert=expert),
    ]


def _mlp(shape: Shape, config: Mapping[str, Any], index: int) -> list[Linear]:
    if shape.kind.mlp == "plain":
        return [
            Linear(shape.hidden, shape.intermediate),
            Linear(shape.intermediate, shape.hidden),
        ]
    step = positive(config, "decoder_sparse_step", "interleave_moe_layer_step", default=1)
    sparse = (index + 1) % step == 0
    sparse &= index >= number(config, "first_k_dense_replace", default=0)
    if config.get("moe_layers") is not None:
        sparse = index in values(config, "moe_layers")
    if shape.kind.mlp != "experts" or not sparse or index in values(config, "mlp_only_layers"):
        return _gated(shape, number(config, "intermediate_size_mlp", default=shape.intermediate))
    experts = expert_count(config)
    width = number(config, "moe_intermediate_size", default=shape.intermediate)
    router = Linear(shape.hidden, experts, quantized=False)
    shared = []
    if shape.kind.shared_expert == "with a gate":
        gate = Linear(shape.hidden, 1, quantized=False)
        shared = [gate, *_gated(shape, number(config, "shared_expert_intermediate_size"))]
    elif shape.kind.shared_expert == "one":
        shared = _gated(shape, width)
    elif count := number(config, "n_shared_experts", default=0):
        shared = _gated(shape, count * width)
    apart = EXPERTS.get(shape.kind.model_type) != WITH_LAYERS
    return [router, *shared, *_gated(shape, width, experts, experts_per_row(config), expert=apart)]


def linear_bytes(linear: Linear, item: int, config: Mapping[str, Any]) -> int:
    """Bytes of one stored weight matrix; of a packed one codes, scales, zeros and group index."""
    quantization = part(config, "quantization_config")
    row_packed = row_bits(quantization, linear.inputs)
    whole = linear.expert or not packs_experts_alone(quantization)
    if row_packed is not None and linear.quantized and whole:
        return math.ceil(linear.inputs * linear.outputs * row_packed / 8)
    bits = number(quantization, "bits", default=0)
    if not bits or not linear.quantized:
        return linear.inputs * linear.outputs * item
    group = quantization.get("group_size")
    group = 0 if group == -1 else number(quantization, "group_size", default=0)
    groups = -(-linear.inputs // group) if group else 1
    codes = linear.inputs * linear.outputs * bits // 8
    scales_and_zeros = groups * linear.outputs * 2 + groups * linear.outputs * bits // 8
    kind = PACKED_KINDS.get(str(quantization.get("quant_method")))
    group_index = 4 * linear.inputs if kind is not None and "g_idx" in kind.tensors else 0
    return codes + scales_and_zeros + group_index


def resident_params(shape: Shape, config: Mapping[str, Any]) -> int:
    """Weights outside of decoder layers: tables of words and positions, head and last norm."""
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    norm = shape.hidden * (2 if shape.kind.biases == "all" else 1)
    more = 0
    if shape.kind.model_type == "gpt_bigcode":
        more = number(config, "n_positions", default=1024) * shape.hidden
    elif shape.kind.gemma4 and (each := _per_layer_inputs(config)):
        words = positive(config, "vocab_size_per_layer_input", default=shape.vocab)
        more = (words + shape.hidden) * shape.layers * each + each  # table, projection, its norm
    return tables + norm + more


def kv_elements(shape: Shape, config: Mapping[str, Any], index: int) -> int:
    """Elements that one token adds to the cache of a layer."""
    if shape.kind.gemma4:
        head_dim, kv_heads, own = _gemma4_heads(shape, config, index)
        return 2 * kv_heads * head_dim if own else 0
    if shape.kind.latent:
        return number(config, "kv_lora_rank") + number(config, "qk_rope_head_dim")
    return 2 * shape.kv_heads * shape.head_dim


def expanded_elements(shape: Shape, config: Mapping[str, Any]) -> int:
    """Of one token what all heads' keys and values take beside its latent; 0 where it has none."""
    if not shape.kind.latent:
        return 0
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    plain, rotated, value = (number(config, name) for name in names)
    # the product that gives keys and values, and the keys with their rotated part behind them
    return shape.heads * (plain + value + plain + rotated)


def expert_count(config: Mapping[str, Any]) -> int:
    """Experts of a mixture's layer."""
    return positive(config, "num_local_experts", "num_experts", "n_routed_experts", default=8)


def experts_per_row(config: Mapping[str, Any]) -> int:
    """Of a mixture's experts, how many a row is routed to."""
    return positive(config, "num_experts_per_tok", "top_k_experts", default=2)
