"""How big a model is: from its checkpoint's headers, or before any download from config.json.

What a layer holds is counted by layer_shapes.py, or on a model that is built (built_sizes.py).
Knows no device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specexec_cli.catalog.architectures import ARCHITECTURES, known_config
from specexec_cli.config import DTYPE_BYTES
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.planning.built_sizes import built
from specexec_cli.planning.config_values import check_counts, part
from specexec_cli.planning.layer_shapes import (
    Linear,
    expanded_elements,
    expert_count,
    experts_per_row,
    kv_elements,
    layer_weights,
    linear_bytes,
    read_shape,
    resident_params,
)
from specexec_cli.planning.measured_rates import PACKED_BITS

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

    def asked_for(self, rows: int, least: int = 1) -> float:
        """Bytes of the experts that so many rows need, if all experts are chosen equally often.

        Args:
            least: count only experts that so many of the rows, or more, are routed to.
        """
        chance = self.chosen / self.count
        fewer = sum(
            math.comb(rows, n) * chance**n * (1.0 - chance) ** (rows - n)
            for n in range(min(least, rows + 1))
        )
        return (1.0 - fewer) * sum(self.layers)


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
    # float32 elements that recurrent layers keep of one text, and of each draft node
    state_elements: int = 0
    node_elements: int = 0
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

    @property
    def packed_head(self) -> bool:
        """Whether the head is quantized, as a GGUF file's is; GPTQ and AWQ leave it as it was."""
        return (self.head or self.resident) < 1.5 * self.vocab * self.hidden

    def layers_differ_from(self, item_bytes: int) -> bool:
        """Whether weights of decoder layers are stored in another size than this."""
        return abs(sum(self.layers) - self.layer_params * item_bytes) > 0.25 * self.layer_params

    def loaded(self, item_bytes: int) -> int:
        """Bytes once it is loaded to stay: layers in the compute dtype, packed ones as stored."""
        layers = sum(self.layers) if self.packed else self.layer_params * item_bytes
        return self.resident + layers


def architecture_bytes(config: Mapping[str, Any]) -> ModelBytes:
    """Sizes of the model that a config.json describes.

    Args:
        config: config.json's keys; `dtype` (or torch_dtype) and quantization_config decide the
            bytes per weight, float16 if neither is there.
    Raises:
        ConfigError: the architecture is not known, or a key is missing.
    """
    config = known_config(config)
    check_counts(config)
    if _is_built(config):
        return _built_bytes(config)
    config = {**config, **part(config, "text_config")}
    shape = read_shape(config)
    item = DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    layers, experts, params, active, largest = [], [], 0, 0, 0
    for index in range(shape.layers):
        linears, others, of_experts = layer_weights(shape, config, index)
        others += of_experts
        weights = others * item
        in_experts = [each for each in linears if each.expert]
        experts.append(
            of_experts * item
            + sum(each.count * linear_bytes(each, item, config) for each in in_experts)
        )
        for linear in linears:
            params += linear.inputs * linear.outputs * linear.count
            active += linear.inputs * linear.outputs * linear.active
            largest = max(largest, linear.inputs * linear.outputs)
            weights += linear.count * linear_bytes(linear, item, config)
        params += others
        layers.append(weights)
    resident = resident_params(shape, config)
    head = 0 if shape.tied else shape.vocab * shape.hidden  # and as many in the table
    return ModelBytes(
        layers=tuple(layers), resident=resident * item, head=head * item, table=head * item,
        layer_params=params,
        largest_matrix=largest, active_params=active,
        kv_elements=sum(kv_elements(shape, config, index) for index in range(shape.layers)),
        expanded_elements=expanded_elements(shape, config),
        hidden=shape.hidden, intermediate=shape.intermediate, vocab=shape.vocab,
        experts=_experts(experts, expert_count(config), experts_per_row(config)),
    )  # fmt: skip


def checkpoint_bytes(checkpoint: Checkpoint) -> ModelBytes:
    """As architecture_bytes, with the bytes that are really in the files."""
    config = known_config(checkpoint.config)
    if _is_built(config) or "text_config" in config:
        # names of parts that are not read look like those of layers: what is stored tells the dtype
        return architecture_bytes({**config, "dtype": _stored_dtype(checkpoint)})
    model = architecture_bytes(config)
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
    text = ARCHITECTURES.get(str(part(config, "text_config").get("model_type")), whole)
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
    merged = {**part(config, "text_config"), **config}
    item = DTYPE_BYTES.get(str(merged.get("dtype") or merged.get("torch_dtype")), 2)
    layers, experts, params, active = [], [], 0, 0
    linears: list[Linear] = []
    for layer in model.layers:
        own = [
            Linear(each.inputs, each.outputs, each.count, each.active, expert=each.one_by_one)
            for each in layer.matrices
        ]
        params += layer.others + sum(each.inputs * each.outputs * each.count for each in own)
        active += sum(each.inputs * each.outputs * each.active for each in own)
        stored = [each.count * linear_bytes(each, item, merged) for each in own]
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
        state_elements=sum(layer.state_elements for layer in model.layers),
        node_elements=sum(layer.node_elements for layer in model.layers),
        hidden=model.hidden, intermediate=max(each.outputs for each in linears), vocab=model.vocab,
        experts=_experts(experts, max(counts, default=0), model.chosen),
    )  # fmt: skip


def _experts(layers: Sequence[int], count: int, chosen: int) -> ExpertBytes | None:
    if not any(layers):
        return None
    return ExpertBytes(
        layers=tuple(layers), count=count, chosen=chosen, largest=max(layers) // count
    )
