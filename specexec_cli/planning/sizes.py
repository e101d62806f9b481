"""How big a model is, in bytes: from its weights' counts, and from its checkpoint's headers.

The counts come from models.toml, or from a model that is built without weights. Knows no device.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specexec_cli.catalog.architectures import (
    is_unread_index,
    known_config,
    longest_text,
    text_config,
)
from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.catalog.weight_counts import WeightCounts
from specexec_cli.config import DTYPE_BYTES
from specexec_cli.offload.checkpoint import Checkpoint, TensorRange, TrainedHead
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint
from specexec_cli.planning.built_sizes import count_weights
from specexec_cli.planning.machine_rates import PACKED_BITS

_LAYER = re.compile(r"((?:^|.*?\.)(?:layers|h))\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)(_bias)?$")  # of all experts of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBytes:
    """The experts of a mixture. Bytes are as stored."""

    layers: tuple[int, ...]  # bytes of all experts of each decoder layer; 0 where it has none
    count: int  # experts of a layer
    chosen: int  # of them, how many a row is routed to
    largest: int  # bytes of the largest expert
    row_elements: int = 0  # that one expert makes of one row, on the way and at the end

    @property
    def in_all(self) -> int:
        """Experts of all layers."""
        return self.count * sum(size > 0 for size in self.layers)

    def asked_for(self, rows: int, least: int = 1) -> float:
        """The bytes of experts that `rows` rows need, if all experts are chosen equally often.

        Args:
            least: count only experts to which at least this many rows are routed.
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
    layer_kv: tuple[int, ...] = ()  # of them, each layer's; empty where that is not known
    shares_keys: bool = False  # whether layers attend to the keys of earlier ones
    hidden: int
    intermediate: int  # widest activation inside a layer, per row
    vocab: int
    # key and value elements of one token that a layer makes of its latent while it attends (MLA)
    expanded_elements: int = 0
    # float32 elements that recurrent layers keep of one text, and of each draft node
    state_elements: int = 0
    node_elements: int = 0
    layer_states: tuple[int, ...] = ()  # of a text's, each layer's; empty where that is not known
    head: int = 0  # of the resident bytes, a head's own; 0 where it is the embeddings' table
    table: int = 0  # of the resident bytes, the embeddings' table; 0 where it is the head too
    experts: ExpertBytes | None = None  # None: not a mixture
    packed_as: str = ""  # config.json's quant_method, or the GGUF type that holds most weights
    model_type: str = ""  # as config.json has it, or a part of it for text

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


def architecture_bytes(
    config: Mapping[str, Any], counts: WeightCounts | None = None, dtype: str | None = None
) -> ModelBytes:
    """Sizes of the model that a config.json describes.

    Args:
        config: config.json's keys; quantization_config decides the bytes of a packed weight.
        counts: the model's weights; None counts them on a model that is built.
        dtype: of weights that are not packed; None takes it from the config, and float16 if the
            config names none.
    Raises:
        ConfigError: the architecture is not known, or the config describes no model.
    """
    text = text_config(config)
    counts = counts or count_weights(known_config(config))
    item = DTYPE_BYTES.get(str(dtype or text.get("dtype") or text.get("torch_dtype")), 2)
    quantization, kinds = text.get("quantization_config"), counts.kinds()
    # by identity: comparing what each layer has takes long for the hundred models of a list
    stored = {id(kind): kind.stored_bytes(item, quantization) for kind, _ in kinds}
    matrices = [each for kind, _ in kinds for each in kind.matrices()]
    of_experts = tuple(stored[id(layer)][1] for layer in counts.layers)
    experts = None
    if any(of_experts):
        experts = ExpertBytes(
            layers=of_experts, count=counts.experts, chosen=counts.chosen,
            largest=max(of_experts) // counts.experts, row_elements=_row_elements(counts),
        )  # fmt: skip
    return ModelBytes(
        layers=tuple(stored[id(layer)][0] for layer in counts.layers),
        resident=counts.outside * item, head=counts.head * item, table=counts.table * item,
        layer_params=sum(times * kind.params for kind, times in kinds),
        largest_matrix=max((inputs * outputs for _, inputs, outputs in matrices), default=0),
        active_params=sum(
            times * kind.active_params(counts.experts, counts.chosen)
            for kind, times in kinds
        ),
        kv_elements=sum(layer.kv for layer in counts.layers),
        layer_kv=tuple(layer.kv for layer in counts.layers),
        shares_keys=bool(text.get("num_kv_shared_layers")),
        expanded_elements=max(layer.expanded for layer in counts.layers),
        state_elements=sum(layer.state for layer in counts.layers),
        node_elements=sum(layer.node for layer in counts.layers),
        layer_states=tuple(layer.state for layer in counts.layers),
        hidden=counts.hidden, intermediate=max((inputs for _, inputs, _ in matrices), default=0),
        vocab=counts.vocab, experts=experts, packed_as=_packed_as(quantization),
        model_type=str(text.get("model_type") or ""),
    )  # fmt: skip


def _packed_as(quantization: Any) -> str:
    """What packs the weights of a config.json; empty where nothing does."""
    settings = quantization if isinstance(quantization, Mapping) else {}
    return str(settings.get("quant_method") or "").lower()


def _type_of_most(checkpoint: Checkpoint) -> str:
    """The type of blocks that most bytes of a GGUF file's are of; empty for other checkpoints."""
    found: Counter[str] = Counter()
    if isinstance(checkpoint, GgufCheckpoint):
        for name, kind in checkpoint.blocks.items():
            found[kind] += checkpoint[name].n_bytes
    return max(found, key=lambda kind: found[kind], default="")


def _row_elements(counts: WeightCounts) -> int:
    """What an expert makes of one row: its linears' outputs, and the gate's in two steps."""
    found = 0
    for layer in set(counts.layers):
        outputs = sum(count * outputs for count, _, outputs in layer.experts) // counts.experts
        gated = max((size for _, size, to in layer.experts if to == counts.hidden), default=0)
        found = max(found, outputs + 2 * gated)
    return found


def checkpoint_bytes(checkpoint: Checkpoint, counts: WeightCounts | None = None) -> ModelBytes:
    """As architecture_bytes, with the bytes that are really in the files."""
    counts = counts or count_weights(known_config(checkpoint.config))
    model = architecture_bytes(checkpoint.config, counts, _stored_dtype(checkpoint))
    model_type = str(text_config(checkpoint.config).get("model_type"))
    found = [
        (name, tensor, _LAYER.match(name))
        for name, tensor in checkpoint.items()
        if not is_unread_index(model_type, name)
    ]
    lists = {place[1] for _, _, place in found if place}
    if (
        "text_config" in known_config(checkpoint.config)
        or len(lists) != 1
        or any(layer.shared for layer in counts.layers)
    ):
        return model  # which of the tensors a layer of text needs is not told by their names
    outside = {name: tensor for name, tensor, place in found if place is None}
    inside = [
        (int(place[2]), name, tensor)
        for name, tensor, place in found
        # layers behind the last predict several tokens, and are not run
        if place is not None and int(place[2]) < len(model.layers)
    ]
    layers = [0] * len(model.layers)
    for index, _, tensor in inside:
        layers[index] += tensor.n_bytes
    resident = sum(tensor.n_bytes for tensor in outside.values())
    head, table = _ends(outside, counts) or (model.head, model.table)
    experts = model.experts and _stored_experts(model.experts, inside)
    return replace(
        model, layers=tuple(layers), resident=resident, head=head, table=table, experts=experts,
        packed_as=_type_of_most(checkpoint) or model.packed_as,
    )  # fmt: skip


def _ends(outside: Mapping[str, TensorRange], counts: WeightCounts) -> tuple[int, int] | None:
    """Bytes of the output head and of the embedding table; None unless the head is called lm_head
    and is another matrix than the table."""
    names = [name for name in outside if name.startswith("lm_head.")]
    head = sum(outside[name].n_bytes for name in names)
    tables = [
        tensor.n_bytes
        for name, tensor in outside.items()
        if name not in names and math.prod(tensor.shape) == counts.table
    ]
    return (head, max(tables)) if head and tables else None


def _stored_experts(
    experts: ExpertBytes, inside: Iterable[tuple[int, str, TensorRange]]
) -> ExpertBytes:
    """The experts with their bytes in the files; as they are where names do not tell of experts.

    Args:
        inside: the layer, the name and the place of each tensor inside the layers.
    """
    each: dict[tuple[int, int], int] = {}  # bytes by layer and expert
    for layer, name, tensor in inside:
        if expert := _EXPERT.search(name):
            shares = {int(expert[1]): tensor.n_bytes}
        elif _FUSED.search(name) and tensor.n_bytes and tensor.shape:
            share = tensor.n_bytes // tensor.shape[0]
            shares = dict.fromkeys(range(tensor.shape[0]), share)
        else:
            continue
        for index, share in shares.items():
            each[layer, index] = each.get((layer, index), 0) + share
    if not each:
        return experts
    by_layer = [0] * len(experts.layers)
    for (layer, _), size in each.items():
        by_layer[layer] += size
    return replace(experts, layers=tuple(by_layer), largest=max(each.values()))


def _stored_dtype(checkpoint: Checkpoint) -> str | None:
    """The dtype of most bytes that are not packed, as config.json calls it; None if all are."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    found: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in names:
            found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.n_bytes
    return names[max(found, key=lambda dtype: found[dtype])] if found else None


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A model and what is known of it before its weights are loaded."""

    entry: ModelEntry
    config: Mapping[str, Any]  # config.json's
    counts: WeightCounts
    sizes: ModelBytes
    source: str  # where the sizes come from: its files, models.toml or config.json
    checkpoint: Checkpoint | None  # headers and folder, where they are here
    head: TrainedHead | None = None  # what makes it a trained head, if it is one

    @property
    def window_tokens(self) -> int | None:
        """The model's own context window; None where nothing tells."""
        return longest_text(text_config(self.config))

    @property
    def stored_dtype(self) -> str | None:
        """Of weights that are not quantized, as config.json says."""
        config = text_config(self.config)
        return config.get("dtype") or config.get("torch_dtype")

    @property
    def table_dtype(self) -> str | None:
        """Of embeddings and head, which are the largest tensors: as the files say, if here."""
        if self.checkpoint is None:
            return self.stored_dtype
        largest = max(self.checkpoint.tensors.values(), key=lambda tensor: tensor.n_bytes)
        names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
        return names.get(largest.dtype)
