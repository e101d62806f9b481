"""How big a model is: from its checkpoint's headers, or before any download from config.json.

Parameter counts per layer follow transformers' modelling files of each architecture; a test builds
the real models and compares. Knows no device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specexec_cli.config import DTYPE_BYTES
from specexec_cli.errors import ConfigError
from specexec_cli.offload.store import Checkpoint
from specexec_cli.planning.architectures import ARCHITECTURES, Architecture, refusal
from specexec_cli.planning.arithmetic import PACKED_BITS
from specexec_cli.planning.built_sizes import built
from specexec_cli.planning.packed_formats import PACKED_KINDS
from specexec_cli.planning.row_bits import packs_experts_alone, row_bits

_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)(_bias)?$")  # of all experts of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBytes:
    """The experts of a mixture. Bytes are as stored."""

    layers: tuple[int, ...]  # bytes of all experts of each decoder layer; 0 where it has none
    count: int  # experts of a layer
    chosen: int  # of them, how many a row is routed to
    largest: int  # bytes of the largest expert

    @property
    def in_all(self) -> int:
        """Experts of all layers."""
        return self.count * sum(size > 0 for size in self.layers)

    def asked_for(self, rows: int) -> float:
        """Bytes of the experts that so many rows need, if all experts are chosen equally often."""
        share = 1.0 - (1.0 - self.chosen / self.count) ** rows
        return share * sum(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """Sizes that decide where a model fits. Bytes are as stored."""

    layers: tuple[int, ...]  # bytes of each decoder layer
    resident: int  # bytes of embeddings, final norm and head
    layer_params: int  # weights of all decoder layers
    largest_matrix: int  # weights of the largest linear of a decoder layer
    active_params: int  # decoder weights that one row is multiplied with (MoE: its experts)
    kv_elements: int  # key and value elements of one token, all layers
    hidden: int
    intermediate: int  # widest activation inside a layer, per row
    vocab: int
    # key and value elements of one token that a layer makes of its latent while it attends (MLA)
    expanded_elements: int = 0
    head: int = 0  # of the resident bytes, a head's own; 0 where it is the embeddings' table
    table: int = 0  # of the resident bytes, the embeddings' table; 0 where it is the head too
    experts: ExpertBytes | None = None  # None: not a mixture

    @property
    def dense(self) -> ModelBytes:
        """The model without its experts: what every row of a pass needs."""
        if self.experts is None:
            return self
        layers = zip(self.layers, self.experts.layers, strict=True)
        return replace(self, layers=tuple(size - own for size, own in layers), experts=None)

    @property
    def total(self) -> int:
        """Bytes of the whole checkpoint."""
        return sum(self.layers) + self.resident

    @property
    def read_bytes(self) -> int:
        """Bytes that a pass over all weights reads: of the embeddings' table it takes few rows."""
        return self.total - self.table

    @property
    def packed(self) -> bool:
        """Whether weights are quantized."""
        return sum(self.layers) < 1.5 * self.layer_params

    @property
    def packed_bits(self) -> int:
        """The measured width that is nearest to the quantized weights'; 0 where they are not."""
        few, many = PACKED_BITS
        if not self.packed:
            return 0
        return few if 16 * sum(self.layers) < (few + many) * self.layer_params else many

    def layers_differ_from(self, item_bytes: int) -> bool:
        """Whether weights of decoder layers are stored in another size than this."""
        return abs(sum(self.layers) - self.layer_params * item_bytes) > 0.25 * self.layer_params

    def loaded(self, item_bytes: int) -> int:
        """Bytes once it is loaded to stay: layers in the compute dtype, packed ones as stored."""
        layers = sum(self.layers) if self.packed else self.layer_params * item_bytes
        return self.resident + layers


@dataclass(frozen=True, slots=True)
class _Linear:
    inputs: int
    outputs: int
    count: int = 1
    active: int = 1  # of `count`, how many a row goes through
    quantized: bool = True  # in a quantized checkpoint
    expert: bool = False  # of the experts that rows are routed to


@dataclass(frozen=True, slots=True)
class _Shape:
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


def architecture_bytes(config: Mapping[str, Any]) -> ModelBytes:
    """Sizes of the model that a config.json describes.

    Args:
        config: config.json's keys; `dtype` (or torch_dtype) and quantization_config decide the
            bytes per weight, float16 if neither is there.
    Raises:
        ConfigError: the architecture is not known, or a key is missing.
    """
    if _is_built(config):
        return _built_bytes(config)
    config = {**config, **config.get("text_config", {})}
    shape = _read_shape(config)
    item = DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    layers, experts, params, active, largest = [], [], 0, 0, 0
    for index in range(shape.layers):
        linears, others, of_experts = _layer(shape, config, index)
        others += of_experts
        weights = others * item
        in_experts = [each for each in linears if each.expert]
        experts.append(
            of_experts * item
            + sum(each.count * _linear_bytes(each, item, config) for each in in_experts)
        )
        for linear in linears:
            params += linear.inputs * linear.outputs * linear.count
            active += linear.inputs * linear.outputs * linear.active
            largest = max(largest, linear.inputs * linear.outputs)
            weights += linear.count * _linear_bytes(linear, item, config)
        params += others
        layers.append(weights)
    resident = _resident_params(shape, config)
    head = 0 if shape.tied else shape.vocab * shape.hidden  # and as many in the table
    return ModelBytes(
        layers=tuple(layers), resident=resident * item, head=head * item, table=head * item,
        layer_params=params,
        largest_matrix=largest, active_params=active,
        kv_elements=_kv_elements(shape, config) * shape.layers,
        expanded_elements=_expanded_elements(shape, config),
        hidden=shape.hidden, intermediate=shape.intermediate, vocab=shape.vocab,
        experts=_experts(experts, _expert_count(config), _chosen(config)),
    )  # fmt: skip


def checkpoint_bytes(checkpoint: Checkpoint) -> ModelBytes:
    """As architecture_bytes, with the bytes that are really in the files."""
    if _is_built(checkpoint.config) or "text_config" in checkpoint.config:
        # names of parts that are not read look like those of layers: what is stored tells the dtype
        return architecture_bytes({**checkpoint.config, "dtype": _stored_dtype(checkpoint)})
    model = architecture_bytes(checkpoint.config)
    layers = [0] * len(model.layers)
    resident = head = table = 0
    own_head = False  # not only a bias beside the embeddings' table
    each: dict[tuple[int, int], int] = {}  # bytes by layer and expert
    for name, tensor in checkpoint.items():
        found = _LAYER.search(name)
        if found and int(found[1]) < len(layers):
            layers[int(found[1])] += tensor.n_bytes
            if expert := _EXPERT.search(name):
                place = int(found[1]), int(expert[1])
                each[place] = each.get(place, 0) + tensor.n_bytes
            elif _FUSED.search(name) and tensor.n_bytes and tensor.shape:
                for index in range(tensor.shape[0]):
                    place = int(found[1]), index
                    each[place] = each.get(place, 0) + tensor.n_bytes // tensor.shape[0]
        elif found is None:  # layers behind the last predict several tokens, and are not run
            resident += tensor.n_bytes
            if name.startswith("lm_head."):
                head += tensor.n_bytes
                own_head |= name != "lm_head.bias"
            else:
                table = max(table, tensor.n_bytes)
    table = table if own_head else 0
    model = replace(model, layers=tuple(layers), resident=resident, head=head, table=table)
    if model.experts is None or not each:
        return model
    by_layer = [0] * len(layers)
    for (layer, _), size in each.items():
        by_layer[layer] += size
    experts = replace(model.experts, layers=tuple(by_layer), largest=max(each.values()))
    return replace(model, experts=experts)


def _is_built(config: Mapping[str, Any]) -> bool:
    """Whether nobody wrote down how the sizes of the part for text follow from config.json."""
    whole = ARCHITECTURES.get(str(config.get("model_type")))
    text = ARCHITECTURES.get(str((config.get("text_config") or {}).get("model_type")), whole)
    return whole is not None and text is not None and text.mlp == "built"


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of most of its bytes, as config.json calls it."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    found: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in names:
            found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.n_bytes
    return names[max(found, key=lambda dtype: found[dtype])] if found else "float16"


def _built_bytes(config: Mapping[str, Any]) -> ModelBytes:
    """As architecture_bytes, of a model that is built to be counted."""
    model = built(config)
    merged = {**config.get("text_config", {}), **config}
    item = DTYPE_BYTES.get(str(merged.get("dtype") or merged.get("torch_dtype")), 2)
    layers, experts, params, active = [], [], 0, 0
    linears: list[_Linear] = []
    for layer in model.layers:
        own = [
            _Linear(each.inputs, each.outputs, each.count, each.active, expert=each.one_by_one)
            for each in layer.matrices
        ]
        params += layer.others + sum(each.inputs * each.outputs * each.count for each in own)
        active += sum(each.inputs * each.outputs * each.active for each in own)
        stored = [each.count * _linear_bytes(each, item, merged) for each in own]
        layers.append(layer.others * item + sum(stored))
        in_experts = sum(size for size, each in zip(stored, own, strict=True) if each.expert)
        experts.append(layer.expert_others * item + in_experts)
        linears += own
    counts = [each.count for each in linears if each.expert]
    return ModelBytes(
        layers=tuple(layers), resident=model.resident * item, head=model.head * item,
        table=model.table * item, layer_params=params, active_params=active,
        largest_matrix=max(each.inputs * each.outputs for each in linears),
        kv_elements=sum(layer.kv_elements for layer in model.layers),
        expanded_elements=max(layer.expanded_elements for layer in model.layers),
        hidden=model.hidden, intermediate=max(each.outputs for each in linears), vocab=model.vocab,
        experts=_experts(experts, max(counts, default=0), model.chosen),
    )  # fmt: skip


def _experts(layers: Sequence[int], count: int, chosen: int) -> ExpertBytes | None:
    if not any(layers):
        return None
    return ExpertBytes(
        layers=tuple(layers), count=count, chosen=chosen, largest=max(layers) // count
    )


def _expert_count(config: Mapping[str, Any]) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return int(next((config[name] for name in names if config.get(name)), 8))


def _chosen(config: Mapping[str, Any]) -> int:
    return int(config.get("num_experts_per_tok", 2))


def _number(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of these that config.json has."""
    for key in keys:
        if config.get(key) is not None:
            return int(config[key])
    if default is None:
        raise ConfigError(f"config.json of this {config['model_type']} model has no '{keys[0]}'")
    return default


def _read_shape(config: Mapping[str, Any]) -> _Shape:
    if not config.get("model_type"):
        raise ConfigError("config.json names no model_type: is it a language model's?")
    name = str(config["model_type"])
    kind = ARCHITECTURES.get(name)
    if kind is None:
        raise ConfigError(f"the model's size cannot be told: {refusal(name)}")

    number = partial(_number, config)
    hidden = number("hidden_size", "n_embd")
    heads = number("num_attention_heads", "n_head")
    if name == "gpt_bigcode":
        kv_heads = 1 if config.get("multi_query", True) else heads
    else:
        kv_heads = number("num_key_value_heads", default=kind.default_kv_heads or heads)
    return _Shape(
        kind=kind,
        hidden=hidden,
        layers=number("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=number("head_dim", default=kind.default_head_dim or hidden // heads),
        intermediate=number("intermediate_size", "n_inner", default=4 * hidden),
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", kind.tied_by_default)),
    )


def _kv_elements(shape: _Shape, config: Mapping[str, Any]) -> int:
    """Elements that one token adds to the cache of a layer."""
    if shape.kind.latent:
        return _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
    return 2 * shape.kv_heads * shape.head_dim


def _expanded_elements(shape: _Shape, config: Mapping[str, Any]) -> int:
    """Of one token what all heads' keys and values take beside its latent; 0 where it has none."""
    if not shape.kind.latent:
        return 0
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    plain, rotated, value = (_number(config, name) for name in names)
    # the product that gives keys and values, and the keys with their rotated part behind them
    return shape.heads * (plain + value + plain + rotated)


def _latent_attention(shape: _Shape, config: Mapping[str, Any]) -> tuple[list[_Linear], int]:
    """Linears of multi-head latent attention, and the weights of their norms."""
    latent, rotated, value, query = (
        _number(config, name)
        for name in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim")
    )
    queries, rank = shape.heads * (query + rotated), config.get("q_lora_rank")
    linears = [
        _Linear(shape.hidden, latent + rotated),
        _Linear(latent, shape.heads * (query + value)),
        _Linear(shape.heads * value, shape.hidden),
    ]
    if rank is None:
        return [_Linear(shape.hidden, queries), *linears], latent
    return [_Linear(shape.hidden, rank), _Linear(rank, queries), *linears], latent + rank


def _layer(shape: _Shape, config: Mapping[str, Any], index: int) -> tuple[list[_Linear], int, int]:
    """One decoder layer: its linears, and the number of its other weights (norms, biases), those
    of experts apart."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = [
        _Linear(shape.hidden, query),
        _Linear(shape.hidden, key, 2, 2),
        _Linear(query, shape.hidden),
    ]
    biases = of_experts = 0
    others = shape.kind.norms * shape.hidden + (shape.heads if shape.kind.sinks else 0)
    if shape.kind.latent:
        attention, norms = _latent_attention(shape, config)
        others += norms
    if shape.kind.router_bias and index >= int(config.get("first_k_dense_replace", 0)):
        others += _expert_count(config)
    if shape.kind.query_key_norms == "one head":
        others += 2 * shape.head_dim
    elif shape.kind.query_key_norms == "all heads":
        others += query + key
    if shape.kind.biases == "qkv":
        biases += query + 2 * key
    elif shape.kind.biases == "all":
        others += 2 * shape.hidden  # LayerNorm has a bias
        if config.get("use_bias", True):
            biases += query + 2 * key + 2 * shape.hidden + shape.intermediate
    elif shape.kind.biases == "with experts":
        count = _expert_count(config)
        of_experts = count * (2 * shape.intermediate + shape.hidden)
        biases += count
        if config.get("attention_bias", True):
            biases += query + 2 * key + shape.hidden
    elif config.get("attention_bias", False):
        output = 0 if shape.kind.biases == "qkv as configured" else shape.hidden
        biases += query + 2 * key + output
    return attention + _mlp(shape, config, index), others + biases, of_experts


def _mlp(shape: _Shape, config: Mapping[str, Any], index: int) -> list[_Linear]:
    def gated(
        width: int, experts: int = 1, active: int = 1, *, expert: bool = False
    ) -> list[_Linear]:
        return [
            _Linear(shape.hidden, width, 2 * experts, 2 * active, expert=expert),
            _Linear(width, shape.hidden, experts, active, expert=expert),
        ]

    if shape.kind.mlp == "plain":
        return [
            _Linear(shape.hidden, shape.intermediate),
            _Linear(shape.intermediate, shape.hidden),
        ]
    sparse = (index + 1) % int(config.get("decoder_sparse_step", 1)) == 0
    sparse &= index >= int(config.get("first_k_dense_replace", 0))
    if shape.kind.mlp != "experts" or not sparse or index in config.get("mlp_only_layers", ()):
        return gated(shape.intermediate)
    experts = _expert_count(config)
    width = int(config.get("moe_intermediate_size", shape.intermediate))
    router = _Linear(shape.hidden, experts, quantized=False)
    shared = []
    if shape.kind.shared_expert:
        gate = _Linear(shape.hidden, 1, quantized=False)
        shared = [gate, *gated(int(config["shared_expert_intermediate_size"]))]
    elif config.get("n_shared_experts"):
        shared = gated(int(config["n_shared_experts"]) * width)
    return [router, *shared, *gated(width, experts, _chosen(config), expert=True)]


def _linear_bytes(linear: _Linear, item: int, config: Mapping[str, Any]) -> int:
    """Bytes of one stored weight matrix; of a packed one codes, scales, zeros and group index."""
    quantization = config.get("quantization_config") or {}
    row_packed = row_bits(quantization, linear.inputs)
    whole = linear.expert or not packs_experts_alone(quantization)
    if row_packed is not None and linear.quantized and whole:
        return math.ceil(linear.inputs * linear.outputs * row_packed / 8)
    bits = int(quantization.get("bits") or 0)
    if not bits or not linear.quantized:
        return linear.inputs * linear.outputs * item
    group = int(quantization.get("group_size") or -1)
    groups = 1 if group == -1 else -(-linear.inputs // group)
    codes = linear.inputs * linear.outputs * bits // 8
    scales_and_zeros = groups * linear.outputs * 2 + groups * linear.outputs * bits // 8
    kind = PACKED_KINDS.get(str(quantization.get("quant_method")))
    group_index = 4 * linear.inputs if kind is not None and "g_idx" in kind.tensors else 0
    return codes + scales_and_zeros + group_index


def _resident_params(shape: _Shape, config: Mapping[str, Any]) -> int:
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    norm = shape.hidden * (2 if shape.kind.biases == "all" else 1)
    positions = 0
    if shape.kind.model_type == "gpt_bigcode":
        positions = int(config.get("n_positions", 1024)) * shape.hidden
    return tables + norm + positions
