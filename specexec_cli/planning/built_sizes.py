"""Counts a model's weights on transformers' own model of it, which is built without weights.

Building takes torch and a tenth of a second to a second; the counts are kept (kept_counts.py). The
models of models.toml need none of it: it has their counts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from specexec_cli.catalog.architectures import ARCHITECTURES, picked_tokens, refusal, text_config
from specexec_cli.catalog.weight_counts import LayerCounts, WeightCounts
from specexec_cli.errors import ConfigError, OutOfMemoryError, clear_shortage
from specexec_cli.guarded import parse_json
from specexec_cli.planning.kept_counts import kept_or

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

# the values of layer_types in transformers' configs for layers that attend to earlier tokens
LAYER_KINDS = (
    "full_attention", "sliding_attention", "chunked_attention", "indexed_attention",
)  # fmt: skip
_BESIDE_A_STATE = "hybrid"  # of layers that attend and keep a recurrent state, as Falcon-H1's

# no model has as many; each is a module that is built
_MOST_LAYERS, _MOST_EXPERTS = 2_000, 10_000
_LEAST_PACKED = 32  # outputs; smaller matrices, such as gates, are quantized by nobody
_FILLING = ("torch.nn.init", "transformers.initialization")  # functions that fill parameters
_LARGE_ZEROS = 1 << 20  # elements that torch.zeros() need not write


def count_weights(config: Mapping[str, Any]) -> WeightCounts:
    """Counts the weights of the model that a config.json describes.

    Raises:
        ConfigError: the architecture is not known, or transformers cannot build the model.
        OutOfMemoryError: there is no room for what it holds beside weights.
    """
    name = str(config.get("model_type") or "")
    if not name:
        raise ConfigError("config.json names no model_type: is it a language model's?")
    if name not in ARCHITECTURES:
        raise ConfigError(f"the model's size cannot be told: {refusal(name)}")
    check_counts(config)
    return _known(json.dumps(dict(config), sort_keys=True))


def check_counts(config: Mapping[str, Any]) -> None:
    """Looks at how many layers and experts a config asks for, in all its parts, before any is made,
    and at how many tokens an index picks.

    Raises:
        ConfigError: more than any model has, or no count.
    """
    picked_tokens(text_config(config))
    waiting = [config]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, Mapping):
                waiting.append(value)
            most = {"layers": _MOST_LAYERS, "layer": _MOST_LAYERS, "experts": _MOST_EXPERTS}.get(
                key.rpartition("_")[2]
            )
            if most is not None and type(value) is int and value > most:
                raise ConfigError(
                    f"config.json says {str(value)[:60]} as '{key}', more than any model has"
                )


@lru_cache(maxsize=8)
def _known(config_json: str) -> WeightCounts:
    return kept_or(config_json, _counted, __file__)


def _counted(config_json: str) -> WeightCounts:
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
    if not layers:
        raise ConfigError("config.json describes no model: it has no layers")
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    outside = {
        name: tensor.numel()
        for name, tensor in text_tensors(model)
        if not name.startswith(f"{path}.") and name not in tied
    }
    head = path_of(model, output_head(model))
    table = path_of(model, model.get_input_embeddings())
    experts = [_separable_experts(layer) for layer in layers]
    return WeightCounts(
        layers=tuple(
            _count(layer, text, attends(text, index), _shared(layer, f"{path}.{index}.", tied))
            for index, layer in enumerate(layers)
        ),
        outside=sum(outside.values()),
        head=sum(count for name, count in outside.items() if name.startswith(f"{head}.")),
        table=outside.get(f"{table}.weight", 0) if f"{head}.weight" in outside else 0,
        hidden=int(text.hidden_size),
        vocab=int(text.vocab_size),
        experts=max((part.gate_up_proj.shape[0] for each in experts for part in each), default=0),
        chosen=chosen_experts(text),
    )


def attends(config: PretrainedConfig, index: int) -> bool:
    """Whether a layer attends to earlier tokens; others keep a state of another kind alone."""
    layer_types = getattr(config, "layer_types", None)
    return layer_types is None or layer_types[index] in (*LAYER_KINDS, _BESIDE_A_STATE)


def _separable_experts(layer: nn.Module) -> list[Any]:
    return [module for module in layer.modules() if has_separable_experts(module)]


def _shared(layer: nn.Module, prefix: str, tied: Container[str]) -> int:
    """Weights of a layer that are an earlier layer's."""
    return sum(each.numel() for name, each in own_tensors(layer) if prefix + name in tied)


def _count(
    layer: nn.Module, config: PretrainedConfig, keeps_keys: bool, shared: int
) -> LayerCounts:
    from torch import nn

    separable = _separable_experts(layer)
    experts = max((part.gate_up_proj.shape[0] for part in separable), default=0)
    found: dict[str, Counter[tuple[int, int]]] = {}
    others = expert_others = 0
    for name, tensor in own_tensors(layer):
        path, _, leaf = name.rpartition(".")
        module = layer.get_submodule(path)
        if tensor.ndim == 3 and not isinstance(module, nn.Conv1d):
            role = "experts" if module in separable else "routed"
            count, inputs, outputs = _expert_matrices(leaf, tensor, int(config.hidden_size))
            if role == "experts" and leaf == "gate_up_proj" and inputs == tensor.shape[2]:
                # unless they lie transposed, checkpoints have both halves apart
                count, outputs = 2 * count, outputs // 2
        elif tensor.ndim == 2 and not leaf.endswith("bias"):
            outputs, inputs = tensor.shape
            count, role = 1, "dense" if _is_packed(module, outputs, experts) else "plain"
        else:
            others += tensor.numel()
            expert_others += tensor.numel() if module in separable else 0
            continue
        found.setdefault(role, Counter())[inputs, outputs] += count
    roles: dict[str, Any] = {
        role: tuple((count, *shape) for shape, count in shapes.items())
        for role, shapes in found.items()
    }
    state, node = _recurrent_elements(layer)
    return LayerCounts(
        others=others,
        expert_others=expert_others,
        shared=shared,
        kv=_kv_elements(layer, config) if keeps_keys else 0,
        expanded=_expanded(layer),
        state=state,
        node=node,
        **roles,
    )


def _recurrent_elements(layer: nn.Module) -> tuple[int, int]:
    """Float32 elements that a recurrent layer keeps of one text, and of each draft node.

    Of a text it keeps two states, before and behind the pending rows; of a node what goes into the
    convolution and what comes out of it. Mamba-1 keeps the rates at which its states decay, too,
    and a step for each channel of a node.
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
            rates = getattr(part, "A_log", None)
            if rates is not None and rates.ndim == 2:
                state += 3 * rates.numel() + 2 * channels * (width - 1)
                node += 3 * channels + 2 * rates.shape[1]
                continue
            state += 2 * (channels * (width - 1) + heads * keys * values)
            node += 2 * channels
    return state, node


# names that recurrent modules give the number of heads, and the key and value dimensions of each
_STATE_SIZES = (
    ("num_v_heads", "num_heads"),
    ("head_k_dim", "ssm_state_size", "head_dim"),
    ("head_v_dim", "head_dim"),
)


def _is_packed(module: nn.Module, outputs: int, experts: int) -> bool:
    """Whether quantized checkpoints have a module's matrix quantized: routers and gates stay."""
    from torch import nn

    linear = type(module).forward is nn.Linear.forward
    return linear and outputs >= _LEAST_PACKED and outputs != experts


def _expert_matrices(leaf: str, weights: Tensor, hidden: int) -> tuple[int, int, int]:
    """The count, inputs and outputs of matrices in one tensor; some models have them transposed."""
    count, outputs, inputs = weights.shape
    if (leaf == "gate_up_proj" and inputs != hidden) or (leaf == "down_proj" and outputs != hidden):
        return count, outputs, inputs
    return count, inputs, outputs


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
    from torch.overrides import TorchFunctionMode

    class EmptyOnMeta(TorchFunctionMode):
        """torch.empty() and large torch.zeros() take no memory: large parameters are never there.

        _parameters_on_meta() alone lets each come into being first; the freed memory tears holes
        into the heap, whose address space grows by the size of the whole model. What has no values
        is not filled with random ones: torch would import its compiler for that.
        """

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if getattr(func, "__module__", "") in _FILLING and kwargs["tensor"].is_meta:
                return kwargs["tensor"]
            if func not in (torch.empty, torch.zeros) or kwargs.get("device") is not None:
                return func(*args, **kwargs)
            made = func(*args, **{**kwargs, "device": "meta"})
            if func is torch.empty:
                return made
            if made.numel() < _LARGE_ZEROS:
                return func(*args, **kwargs)
            return torch.zeros((), dtype=made.dtype).expand(made.shape)

    shortage = clear_shortage("a model does not fit into it, even without its weights")
    with shortage, _parameters_on_meta(), EmptyOnMeta():
        model: PreTrainedModel = text_model_class(config)._from_config(
            config,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        )
    _see_all_tokens(model)
    return model.eval()


def _see_all_tokens(model: nn.Module) -> None:
    """Takes out the indexes by which layers pick the tokens they see: they then see all.

    A layer that would go by another's picks gets the same in place of an index of its own.
    """
    for part in list(model.modules()):
        picks = hasattr(getattr(part, "indexer", None), "index_topk")
        if picks or getattr(part, "skip_topk", False):
            del part.indexer
            part.indexer = _no_picks  # type: ignore[assignment]


def _no_picks(*args: Any, **kwargs: Any) -> None:
    """None: in place of the tokens that a layer's index picks."""


def sees_all(part: nn.Module) -> bool:
    """Whether a module attended to the tokens of an index that was taken out."""
    return getattr(part, "indexer", None) is _no_picks


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are made meanwhile have parameters of their own, on the meta device."""
    from torch import nn

    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


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


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """The output head, of the part for text where transformers names none of the whole model."""
    from transformers import PreTrainedModel

    head: nn.Module | None = model.get_output_embeddings()
    if head is None and isinstance(part := text_decoder(model), PreTrainedModel):
        head = part.get_output_embeddings()
    return head


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
    for module in (model.get_input_embeddings(), output_head(model)):
        text += [path_of(model, module)] if module is not None else []
    return text


def text_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """own_tensors of the parts that read and write text."""
    text = text_paths(model)
    for name, tensor in own_tensors(model):
        if any(not path or name.startswith(f"{path}.") for path in text):
            yield name, tensor
