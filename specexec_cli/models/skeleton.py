"""transformers' own model, built without weights, and what each of its tensors is called on disk.

No modelling code is rewritten: linears become MixedLinear, fused experts become PerExpert, and the
rest of the architecture is transformers'.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specexec_cli.errors import CheckpointError
from specexec_cli.models.linear import MixedLinear, PerExpert, with_mixed_linears
from specexec_cli.models.quant_checkpoint import Quantization, replace_linears
from specexec_cli.offload.store import Checkpoint, TensorRange
from specexec_cli.planning.architectures import ARCHITECTURES, Rename

_FLOATS = ("F16", "BF16", "F32", "F64")
# a matrix of one expert, as PerExpert names it inside a layer
_OF_EXPERT = re.compile(r"(?P<block>.*)\.experts\.(?P<index>\d+)\.(?P<linear>gate|up|down)\.weight")


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model without weights and the tensors that belong into it."""

    model: PreTrainedModel
    config: PretrainedConfig
    layers: nn.ModuleList
    # per layer: parameter name inside the layer -> where its bytes are
    layer_tensors: list[dict[str, TensorRange]]
    # everything else: parameter name -> where its bytes are
    resident_tensors: dict[str, TensorRange]


def load_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """The checkpoint's config.json as transformers' own object.

    Raises:
        CheckpointError: it is missing or broken, or its architecture is not supported.
    """
    path, stored = checkpoint.folder / "config.json", dict(checkpoint.config)
    supported = f"Supported architectures: {', '.join(ARCHITECTURES)}"
    model_type = stored.get("model_type")
    # before transformers sees it: what we do not know must not reach any code of the checkpoint
    if str(model_type) not in ARCHITECTURES:
        raise CheckpointError(f"{path}: architecture '{model_type}' is not supported. {supported}")
    try:
        config = CONFIG_MAPPING[str(model_type)].from_dict(stored)
    except Exception as error:  # a config class checks its values with what it likes
        raise CheckpointError(f"{path} is not usable: {_reason(error)}. {supported}") from error
    if not config.num_hidden_layers >= 1:
        raise CheckpointError(f"{path}: a model of {config.num_hidden_layers} layers has no text")
    return config


def _reason(error: Exception) -> str:
    first = (str(error).strip() or "no reason given").splitlines()[0].rstrip(".")
    return f"{type(error).__name__}: {first}" if isinstance(error, KeyError) else first


def build_skeleton(
    config: PretrainedConfig, checkpoint: Checkpoint, quantization: Quantization | None = None
) -> Skeleton:
    """Builds the model on the meta device and finds each of its tensors in the checkpoint.

    Args:
        quantization: of the checkpoint, if it is quantized.
    Raises:
        CheckpointError: a tensor is missing or of another shape than the config says.
    """
    # Soft-capped attention logits exist in transformers' eager attention alone.
    softcapping = getattr(config, "attn_logit_softcapping", None) is not None
    try:
        with init_empty_weights(include_buffers=False), _EmptyOnMeta():
            model = AutoModelForCausalLM.from_config(
                config,
                attn_implementation="eager" if softcapping else "sdpa",
                dtype=torch.float32,
                trust_remote_code=False,
            )
    except Exception as error:  # whatever a value of the config makes transformers do
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'} describes no model that transformers can build: "
            f"{_reason(error)}"
        ) from error
    model.eval()
    path, layers = _decoder_layers(model, config.num_hidden_layers)
    rename = ARCHITECTURES[config.model_type].renames
    for index, layer in enumerate(layers):
        _replace_modules(layer)
        if quantization is not None:
            stored_name = partial(_stored, renames=rename, prefix=f"{path}.{index}.")
            replace_linears(layer, MixedLinear, stored_name, quantization)
    if quantization is not None:
        replace_linears(model, nn.Linear, lambda name: name, quantization)
    layer_tensors = [
        _find_layer(checkpoint, layer, f"{path}.{index}.", rename)
        for index, layer in enumerate(layers)
    ]
    resident = _find_resident(checkpoint, model, f"{path}.")
    return Skeleton(model, config, layers, layer_tensors, resident)


class _EmptyOnMeta(TorchFunctionMode):
    """torch.empty() makes no memory, so that large parameters are never allocated.

    init_empty_weights alone lets each come into being first; the freed memory tears holes into the
    heap, whose address space grows by the size of the whole model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _decoder_layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise CheckpointError(f"{type(model).__name__} has no list of {count} decoder layers")


def _replace_modules(layer: nn.Module) -> None:
    """Linears and fused experts of one layer become those that keep the file's dtype."""
    for name, module in list(layer.named_modules()):
        replacement: nn.Module
        if isinstance(module, nn.Linear):
            bias = module.bias is not None
            replacement = MixedLinear(module.in_features, module.out_features, bias=bias)
        elif hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            replacement = _per_expert(module)
        else:
            if type(module).__name__.endswith("TopKRouter"):  # multiplies without an nn.Linear
                module.forward = with_mixed_linears(module.forward)
            continue
        parent, _, leaf = name.rpartition(".")
        setattr(layer.get_submodule(parent), leaf, replacement)


def _per_expert(fused: nn.Module) -> PerExpert:
    """Separate linears for transformers' fused (experts, 2 * intermediate, hidden) tensors."""
    experts, double, hidden = fused.gate_up_proj.shape  # type: ignore[misc]

    def expert() -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "gate": MixedLinear(hidden, double // 2, bias=False),
                "up": MixedLinear(hidden, double // 2, bias=False),
                "down": MixedLinear(double // 2, hidden, bias=False),
            }
        )

    return PerExpert(nn.ModuleList(expert() for _ in range(experts)), fused.act_fn)  # type: ignore[arg-type]


def _find_layer(
    checkpoint: Checkpoint,
    layer: nn.Module,
    prefix: str,
    renames: tuple[Rename, ...],
) -> dict[str, TensorRange]:
    found = {}
    for name, parameter in layer.named_parameters():
        stored = _stored(name, renames, prefix)
        if _lookup(checkpoint, stored) is None and _lookup(checkpoint, prefix + name) is not None:
            stored = prefix + name  # saved under transformers' names
        part = _of_fused(checkpoint, prefix, name, parameter)
        found[name] = part or _find(checkpoint, stored, parameter)
    return found


def _of_fused(
    checkpoint: Checkpoint, prefix: str, name: str, parameter: nn.Parameter
) -> TensorRange | None:
    """An expert's matrix inside a tensor of all experts, None where it has one of its own.

    transformers saves (experts, 2 * intermediate, hidden), the rows of `gate` before those of
    `up`, and (experts, hidden, intermediate), unless it is told to keep to the checkpoint's names.

    Raises:
        CheckpointError: the tensor of all experts is of another shape than the config says.
    """
    of_expert = _OF_EXPERT.fullmatch(name)
    if of_expert is None:
        return None
    down = of_expert["linear"] == "down"
    fused = f"{prefix}{of_expert['block']}.{'down_proj' if down else 'gate_up_proj'}"
    tensor = _lookup(checkpoint, fused)
    if tensor is None:
        return None
    rows, columns = parameter.shape
    each, index = rows if down else 2 * rows, int(of_expert["index"])
    if len(tensor.shape) != 3 or tensor.shape[1:] != (each, columns) or index >= tensor.shape[0]:
        raise CheckpointError(
            f"{tensor.path}: tensor '{fused}' has shape {list(tensor.shape)}, config.json asks for "
            f"[experts, {each}, {columns}]. Are both files of the same model?"
        )
    first = each * index + (rows if of_expert["linear"] == "up" else 0)
    return tensor.rows(first, rows)


def _stored(name: str, renames: tuple[Rename, ...], prefix: str) -> str:
    """The name in the checkpoint of a parameter or module inside a layer."""
    dotted = f"{name}."  # the patterns end where a part of the name ends
    for pattern, replacement in renames:
        dotted = re.sub(pattern, replacement, dotted)
    return prefix + dotted[:-1]


def _find_resident(
    checkpoint: Checkpoint, model: PreTrainedModel, layers_prefix: str
) -> dict[str, TensorRange]:
    tied = model.config.tie_word_embeddings
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(layers_prefix) or (tied and name.startswith("lm_head.")):
            continue
        found[name] = _find(checkpoint, name, parameter)
    return found


def _lookup(checkpoint: Checkpoint, name: str) -> TensorRange | None:
    # a checkpoint saved from the bare base model lacks its prefix
    bare = name.partition(".")[2]
    return checkpoint.tensors.get(name) or checkpoint.tensors.get(bare)


def _find(checkpoint: Checkpoint, name: str, parameter: nn.Parameter) -> TensorRange:
    tensor = _lookup(checkpoint, name)
    if tensor is None:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor '{name}' is missing. "
            "The download may be incomplete, or config.json belongs to another model"
        )
    if tensor.shape != tuple(parameter.shape):
        raise CheckpointError(
            f"{tensor.path}: tensor '{name}' has shape {list(tensor.shape)}, config.json says "
            f"{list(parameter.shape)}. Are both files of the same model?"
        )
    if parameter.is_floating_point() and tensor.dtype not in _FLOATS:
        raise CheckpointError(
            f"{tensor.path}: tensor '{name}' is stored as {tensor.dtype}, not as one of "
            f"{', '.join(_FLOATS)}. Is it quantized in a way that config.json does not tell?"
        )
    return tensor
