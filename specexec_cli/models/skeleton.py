"""Builds transformers' own model without weights, and finds each of its tensors on disk.

No modelling code is rewritten: linears become MixedLinear, fused experts become PerExpert, and the
rest of the architecture is transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import (
    CONFIG_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from specexec_cli.catalog.architectures import ARCHITECTURES, known_config, refusal
from specexec_cli.errors import CheckpointError, OutOfMemoryError
from specexec_cli.models import attention
from specexec_cli.models.expert_mlp import PerExpert, per_expert
from specexec_cli.models.head_input import make_head
from specexec_cli.models.layer_states import LAYER_STATES
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.modelling_code import attends_by_interface
from specexec_cli.models.own_bits import use_own_bits
from specexec_cli.models.packed_linear import parameter_name
from specexec_cli.models.packing import Packing, replace_linears
from specexec_cli.models.recurrent_layers import follow_ancestors, is_recurrent
from specexec_cli.models.restored import Restored, makings, restore
from specexec_cli.models.stored_names import Assembly, StoredNames, expert_places
from specexec_cli.models.tensor_finder import TensorFinder
from specexec_cli.models.token_index import keep_masks_whole
from specexec_cli.offload.checkpoint import Checkpoint, TensorRange, TrainedHead
from specexec_cli.planning.built_sizes import (
    LAYER_KINDS,
    check_counts,
    decoder_layers,
    empty_model,
    has_separable_experts,
)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model without weights, and the places of its tensors in the checkpoint."""

    model: PreTrainedModel
    config: PretrainedConfig  # config of the part that reads and writes text
    layers: nn.ModuleList
    layers_path: str  # path of `layers` in the model
    # for each layer: parameter name inside the layer -> place of its bytes; a parameter made of
    # several tensors is listed as pieces, with names that is_piece() recognizes
    layer_tensors: list[dict[str, TensorRange]]
    # for each layer: how parameters are made of pieces
    conversions: list[list[Assembly]]
    # parameters outside the layers: name -> place of its bytes
    resident_tensors: dict[str, TensorRange]
    unused: dict[str, str]  # tensors of the checkpoint that text does not need -> reason
    restored: Restored  # changes to undo in a GGUF file's weights
    head: TrainedHead | None = None  # what makes it a trained head, if it is one


def load_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """The text part of the checkpoint's config.json, as transformers' config object.

    Raises:
        CheckpointError: the config is missing or broken, or its architecture is not supported.
    """
    whole = _load_whole_config(checkpoint)
    config = whole.get_text_config(decoder=True)
    layers = getattr(config, "num_hidden_layers", 0)
    if not layers >= 1:
        raise CheckpointError(f"{checkpoint.config_path}: a model of {layers} layers has no text")
    if reason := _unknown_attention(config):
        raise CheckpointError(f"{checkpoint.config_path}: {reason}, which is not supported")
    if getattr(config, "eos_token_id", None) is None:
        config.eos_token_id = getattr(whole, "eos_token_id", None)
    return config


def _unknown_attention(config: PretrainedConfig) -> str | None:
    """Unsupported layers, positions or attention that a config asks for; None if there are none.

    Tests of a model type may not cover all that its configs can ask for.
    """
    for kind in dict.fromkeys(getattr(config, "layer_types", None) or ()):
        if kind not in LAYER_KINDS and kind not in LAYER_STATES:
            return f"layers of kind '{kind}'"
    if getattr(config, "alibi", False):
        return "biases by distance (ALiBi) in place of positions"
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return "attention in both directions"
    if not getattr(config, "index_kpool_always_select_tail", True):
        return "an index that leaves out a text's latest tokens (index_kpool_always_select_tail)"
    return None


def _load_whole_config(checkpoint: Checkpoint) -> PretrainedConfig:
    path, stored = checkpoint.config_path, dict(known_config(checkpoint.config))
    model_type = str(stored.get("model_type"))
    # checked before transformers reads it: an unknown type must not run code from the checkpoint
    if model_type not in ARCHITECTURES:
        raise CheckpointError(f"{path}: {refusal(model_type)}")
    try:
        check_counts(stored)
        return CONFIG_MAPPING[model_type].from_dict(stored)
    except Exception as error:  # config classes check their values with errors of any kind
        raise CheckpointError(f"{path} is not usable: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    first = (str(error).strip() or "no reason given").splitlines()[0].rstrip(".")
    return f"{type(error).__name__}: {first}" if isinstance(error, KeyError) else first


def build_skeleton(checkpoint: Checkpoint, quantization: Packing | None = None) -> Skeleton:
    """Builds the model on the meta device and finds each of its tensors in the checkpoint.

    Args:
        quantization: the checkpoint's packing, if it is quantized.
    Raises:
        CheckpointError: a tensor is missing, has another shape than the config says, or belongs to
            nothing in the model.
    """
    config = load_config(checkpoint)
    model = _build_model(checkpoint)
    if checkpoint.head is not None:
        make_head(model, checkpoint)
    leaves = quantization.leaves if quantization is not None else {}
    made = makings(model, checkpoint)
    names = StoredNames.read(
        model, checkpoint, leaves, {name for each in made for name in each.names}
    )
    layers_path, layers = decoder_layers(model, config.num_hidden_layers)
    for index, layer in enumerate(layers):
        _replace_modules(layer, f"{layers_path}.{index}.", names, checkpoint, leaves)
    for part in model.modules():
        if is_recurrent(part):
            follow_ancestors(part)
        elif not isinstance(part, PreTrainedModel):
            use_own_bits(part)
            keep_masks_whole(part)
    plain = names.plain
    if quantization is not None:
        modules = {
            name.removesuffix(f".{leaf}"): module
            for name, at in plain.items()
            for module, leaf in [leaves.get(at, (at.rpartition(".")[0], at.rpartition(".")[2]))]
        }
        names.plain.update(
            {f"{name.removesuffix(f'.{leaf}')}.{parameter_name(leaf)}": at
             for name, at in plain.items() if at in leaves for _, leaf in [leaves[at]]}
        )  # fmt: skip
        replace_linears(
            model, (MixedLinear, nn.Linear), lambda name: modules.get(name, name), quantization
        )
    restored = restore(model, names, checkpoint)
    finder = TensorFinder(checkpoint, model, names, leaves, [*names.conversions, *made])
    layer_tensors, conversions = [], []
    for index, layer in enumerate(layers):
        tensors, assemblies = finder.layer(layer, f"{layers_path}.{index}.")
        layer_tensors.append(tensors)
        conversions.append(assemblies)
    resident = finder.resident(f"{layers_path}.")
    return Skeleton(
        model, model.config.get_text_config(decoder=True), layers, layers_path, layer_tensors,
        conversions, resident, finder.unused(), restored, checkpoint.head,
    )  # fmt: skip


def _build_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """transformers' own model of a checkpoint, without weights; it may have parts besides text."""
    try:
        model = empty_model(_load_whole_config(checkpoint))
    except (CheckpointError, OutOfMemoryError):
        raise
    except Exception as error:  # a bad value in the config can make transformers raise anything
        raise CheckpointError(
            f"{checkpoint.config_path} describes no model that transformers can build: "
            f"{_reason(error)}"
        ) from error
    text = model.config.get_text_config(decoder=True)
    # models of several parts and older classes do not set _supports_attention_backend
    layers = decoder_layers(model, text.num_hidden_layers)[1]
    if model._supports_attention_backend or attends_by_interface(layers):
        text._attn_implementation = attention.DENSE
    return model


def _replace_modules(
    layer: nn.Module,
    prefix: str,
    names: StoredNames,
    checkpoint: Checkpoint,
    leaves: Mapping[str, tuple[str, str]],
) -> None:
    """Replaces a layer's linears and fused experts by modules that keep the file's dtype."""
    for name, module in list(layer.named_modules()):
        replacement: nn.Module
        if type(module).forward is nn.Linear.forward:
            bias = module.bias is not None
            replacement = MixedLinear(module.in_features, module.out_features, bias=bias)
        elif has_separable_experts(module):
            replacement = _apart(module, f"{prefix}{name}", names, checkpoint, leaves)
        else:
            continue
        parent, _, leaf = name.rpartition(".")
        setattr(layer.get_submodule(parent), leaf, replacement)


def _apart(
    fused: nn.Module,
    path: str,
    names: StoredNames,
    checkpoint: Checkpoint,
    leaves: Mapping[str, tuple[str, str]],
) -> PerExpert:
    """Separate experts in place of a layer's fused ones; enters their places into `names`.

    Raises:
        CheckpointError: the checkpoint stores the experts in an unknown or contradictory way.
    """
    if found := names.apart.get(path):
        linears = {linear for _, linear in found}
        count = fused.gate_up_proj.shape[0]  # type: ignore[index]
        if found != {(index, linear) for index in range(count) for linear in linears}:
            raise CheckpointError(
                f"{checkpoint.folder}: the experts of '{path}' are not the {count} that the config "
                "asks for. Are all files of the same model?"
            )
        return per_expert(fused, transposed=False, halves_apart="gate" in linears)
    lie = set()
    for leaf in ("gate_up_proj", "down_proj"):
        name, transposed = f"{path}.{leaf}", bool(fused.is_transposed)
        conversion = next((each for each in names.conversions if each.first == name), None)
        if conversion is not None:
            names.conversions.remove(conversion)
            if conversion.stacks_experts:
                for inside, place in expert_places(conversion, leaves).items():
                    names.plain[f"{path}.experts.{inside}"] = place
            else:
                stored = conversion.names[0]
                shape = tuple(getattr(fused, leaf).shape)
                turned = conversion.transposes(checkpoint.tensors[stored].shape, shape)
                if turned is None:
                    raise CheckpointError(
                        f"{checkpoint.folder}: how '{stored}' holds the experts of '{path}' is not "
                        "known. Is the checkpoint newer than the installed transformers?"
                    )
                names.plain[name] = stored
                transposed ^= turned
        lie.add(transposed)
    if len(lie) > 1:
        raise CheckpointError(
            f"{checkpoint.folder}: one of '{path}.gate_up_proj' and '{path}.down_proj' is "
            "transposed, the other is not. Are all files of the same model?"
        )
    return per_expert(fused, transposed=lie.pop())
