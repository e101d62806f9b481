"""How big a model is, counted on transformers' own model of it, built without weights.

For the many architectures whose counts nobody has written down in sizes.py. Building takes torch
and seconds, and what it finds is kept for the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from specexec_cli.errors import ConfigError, OutOfMemoryError, clear_shortage
from specexec_cli.guarded import parse_json

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


# the values of layer_types in transformers' configs for layers that attend to earlier tokens
LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class BuiltMatrix:
    """Matrices of one shape."""

    inputs: int
    outputs: int
    count: int
    active: int  # of them how many a row goes through
    one_by_one: bool  # of experts that can come one by one


@dataclass(frozen=True, slots=True)
class BuiltLayer:
    """One decoder layer's weights."""

    matrices: tuple[BuiltMatrix, ...]
    others: int  # weights of norms and biases
    expert_others: int  # of them those of experts that can come one by one
    kv_elements: int  # of one token
    expanded_elements: int  # of one token, made of its latent while the layer attends; 0: no latent
    # float32 elements that a recurrent layer keeps of one text, and of each draft node
    state_elements: int
    node_elements: int


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model's weights; those of parts that read pictures or sound are not counted."""

    layers: tuple[BuiltLayer, ...]
    resident: int  # weights outside the layers
    head: int  # of them the output head's own; 0 where it is the embedding table
    table: int  # of them the embedding table; 0 where it is the head too
    hidden: int
    vocab: int
    chosen: int  # of a mixture's experts, those that a row is routed to


def built(config: Mapping[str, Any]) -> BuiltModel:
    """Counts the weights of the model that a config.json describes.

    Raises:
        ConfigError: transformers cannot build it.
        OutOfMemoryError: there is no room for what it holds beside weights.
    """
    return _built(json.dumps(dict(config), sort_keys=True))


@lru_cache(maxsize=8)
def _built(config_json: str) -> BuiltModel:
    from transformers import CONFIG_MAPPING

    stored = parse_json(config_json)
    try:
        model = empty_model(CONFIG_MAPPING[stored["model_type"]].from_dict(stored))
    except OutOfMemoryError:
        raise
    except Exception as error:  # whatever a value of the config makes transformers do
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"config.json describes no model: {reason}") from error
    text = model.config.get_text_config(decoder=True)
    path, layers = decoder_layers(model, text.num_hidden_layers)
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    outside = [
        (name, tensor.numel())
        for name, tensor in text_tensors(model)
        if not name.startswith(f"{path}.") and name not in tied
    ]
    head = path_of(model, model.get_output_embeddings())
    table = path_of(model, model.get_input_embeddings())
    counts = dict(outside)
    return BuiltModel(
        layers=tuple(
            _count(layer, text, attends(text, index)) for index, layer in enumerate(layers)
        ),
        resident=sum(count for _, count in outside),
        head=sum(count for name, count in outside if name.startswith(f"{head}.")),
        table=counts.get(f"{table}.weight", 0) if f"{head}.weight" in counts else 0,
        hidden=int(text.hidden_size),
        vocab=int(text.vocab_size),
        chosen=chosen_experts(text),
    )


def attends(config: PretrainedConfig, index: int) -> bool:
    """Whether a layer attends to earlier tokens; others keep a state of another kind."""
    layer_types = getattr(config, "layer_types", None)
    return layer_types is None or layer_types[index] in LAYER_KINDS


def _count(layer: nn.Module, config: PretrainedConfig, keeps_keys: bool) -> BuiltLayer:
    matrices, others, expert_others = [], 0, 0
    chosen = chosen_experts(config)
    apart = [f"{path}." for path, module in layer.named_modules() if has_separable_experts(module)]
    for name, tensor in own_tensors(layer):
        one_by_one = name.startswith(tuple(apart))
        if tensor.ndim == 3:  # of all experts; a matrix may lie transposed
            count, outputs, inputs = tensor.shape
            matrices.append(BuiltMatrix(inputs, outputs, count, min(chosen, count), one_by_one))
        elif tensor.ndim == 2 and not name.endswith("bias"):
            outputs, inputs = tensor.shape
            # experts that are modules of their own
            matrices.append(BuiltMatrix(inputs, outputs, 1, 1, one_by_one))
        else:
            others += tensor.numel()
            expert_others += tensor.numel() if one_by_one else 0
    kv_elements = _kv_elements(layer, config) if keeps_keys else 0
    state_elements, node_elements = _recurrent_elements(layer)
    return BuiltLayer(
        tuple(matrices), others, expert_others, kv_elements, _expanded(layer), state_elements,
        node_elements,
    )  # fmt: skip


def _recurrent_elements(layer: nn.Module) -> tuple[int, int]:
    """Float32 elements that a recurrent layer keeps of one text, and of each draft node.

    Of a text it keeps two states, before and behind the pending rows; of a node what goes into the
    convolution and what comes out of it.
    """
    from torch import nn

    state = node = 0
    for part in layer.modules():
        for convolution in part.children():
            if not isinstance(convolution, nn.Conv1d):
                continue
            heads, keys, values = (
                next((size for name in names if (size := getattr(part, name, None))), 0)
                for names in _STATE_SIZES
            )
            channels, width = convolution.out_channels, convolution.kernel_size[0]
            state += 2 * (channels * (width - 1) + heads * keys * values)
            node += 2 * channels
    return state, node


# names that recurrent modules give the number of heads, and the key and value dimensions of each
_STATE_SIZES = (
    ("num_v_heads", "num_heads"),
    ("head_k_dim", "ssm_state_size", "head_dim"),
    ("head_v_dim", "head_dim"),
)


_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts")


def chosen_experts(config: PretrainedConfig) -> int:
    """Experts that a row of a mixture is routed to, under the names that configs give it."""
    found = next((value for name in _CHOSEN if (value := getattr(config, name, None))), 1)
    return int(max(found) if isinstance(found, list) else found)  # HunYuan: one for each layer


def has_separable_experts(module: nn.Module) -> bool:
    """Whether a module of transformers holds a layer's experts as MLPs that can be told apart.

    Its decorator for experts says how their weights lie in it. Experts without a gate, or with a
    norm behind each, stay whole.
    """
    from torch import nn

    return (
        isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)
        and getattr(module, "has_gate", False)
        and not module.has_post_expert_norm
    )


def _kv_elements(layer: nn.Module, config: PretrainedConfig) -> int:
    """Elements that one token adds to a layer's cache."""
    for part in layer.modules():
        if getattr(part, "is_kv_shared_layer", False):
            return 0
        if (latent := getattr(part, "kv_a_proj_with_mqa", None)) is not None:
            return int(latent.out_features)
        if (keys := getattr(part, "k_proj", None)) is not None:
            values = getattr(part, "v_proj", None)  # where there is none, keys are values
            return int(keys.out_features + (values or keys).out_features)
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if getattr(config, "new_decoder_architecture", False):
        kv_heads = heads  # Falcon's code gives each query head a copy, and caches the copies
    elif getattr(config, "multi_query", False):
        kv_heads = 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * kv_heads * int(head_dim)


def _expanded(layer: nn.Module) -> int:
    """Elements that attention makes of one token's latent: the product that gives keys and values,
    and the keys with their rotated part behind them."""
    part: Any
    for part in layer.modules():
        if (both := getattr(part, "kv_b_proj", None)) is not None:
            return int(both.out_features + part.num_heads * part.qk_head_dim)
    return 0


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """transformers' own model for text, its parameters on the meta device, its buffers real.

    Raises:
        OutOfMemoryError: there is no room for the buffers; all else is transformers' own error.
    """
    import torch
    from accelerate import init_empty_weights
    from torch.overrides import TorchFunctionMode

    class EmptyOnMeta(TorchFunctionMode):
        """torch.empty() makes no memory, so that large parameters are never allocated.

        init_empty_weights alone lets each come into being first; the freed memory tears holes into
        the heap, whose address space grows by the size of the whole model.
        """

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is torch.empty and kwargs.get("device") is None:
                kwargs = {**kwargs, "device": "meta"}
            return func(*args, **kwargs)

    shortage = clear_shortage("a model does not fit into it, even without its weights")
    with shortage, init_empty_weights(include_buffers=False), EmptyOnMeta():
        model: PreTrainedModel = text_model_class(config)._from_config(
            config,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        )
    return model.eval()


def text_model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """transformers' class that writes text for a config: with pictures or without."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    tables = [MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING]
    if config.get_text_config(decoder=True) is not config:  # text is but a part of it
        tables.reverse()
    found = tables[0].get(type(config), None) or tables[1][type(config)]
    kind: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return kind


def text_decoder(model: PreTrainedModel) -> nn.Module:
    """The part with the layers: the decoder, unless the head is called so (ModernBERT)."""
    from torch import nn

    found: nn.Module = model.get_decoder()
    return model.base_model if isinstance(found, nn.Linear) else found


def decoder_layers(model: PreTrainedModel, count: int) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers and its name in the model.

    Raises:
        ConfigError: there is no list of `count`.
    """
    from torch import nn

    decoder = text_decoder(model)
    prefix = path_of(model, decoder)
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return f"{prefix}.{name}" if prefix else name, module
    raise ConfigError(f"{type(model).__name__} has no list of {count} decoder layers")


def path_of(model: nn.Module, wanted: nn.Module | None) -> str:
    """A module's name in the model."""
    name: str = next(name for name, module in model.named_modules() if module is wanted)
    return name


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters and the buffers that checkpoints hold, by name."""
    yield from module.named_parameters(remove_duplicate=False)
    for path, part in module.named_modules():
        for leaf, buffer in part.named_buffers(recurse=False):
            if leaf not in part._non_persistent_buffers_set:
                yield f"{path}.{leaf}" if path else leaf, buffer


def text_paths(model: PreTrainedModel) -> list[str]:
    """Names of the modules that read and write text; "" is the model itself, all of it."""
    if model.config.get_text_config(decoder=True) is model.config:
        return [""]
    text = [path_of(model, text_decoder(model))]
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        text += [path_of(model, module)] if module is not None else []
    return text


def text_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """own_tensors of the parts that read and write text."""
    text = text_paths(model)
    for name, tensor in own_tensors(model):
        if any(not path or name.startswith(f"{path}.") for path in text):
            yield name, tensor
