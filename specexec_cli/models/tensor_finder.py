"""Finds the checkpoint's tensor for each parameter of a model, and says why others are unused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specexec_cli.errors import CheckpointError
from specexec_cli.models.stored_names import OTHER_PART, Assembly, StoredNames
from specexec_cli.offload.checkpoint import Checkpoint, TensorRange
from specexec_cli.planning.built_sizes import own_tensors, text_paths, text_tensors

# a tensor of one expert, by PerExpert's names
_OF_EXPERT = re.compile(
    r"(?P<block>.*)\.experts\.(?P<index>\d+)\.(?P<linear>gate_up|gate|up|down)\."
    r"(?P<leaf>weight|bias)"
)
_PIECE = "piece "  # prefix of the names of pieces in Skeleton.layer_tensors
# reasons why tensors are not used
_LEAF = "products with unpacked weights do not need it"
_FLOATS = ("F16", "BF16", "F32", "F64")
_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_piece(name: str) -> bool:
    """Whether a name in Skeleton.layer_tensors stands for a piece of a parameter."""
    return name.startswith(_PIECE)


class TensorFinder:
    """Looks up a model's tensors, and lists the checkpoint's tensors that were not looked up."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: PreTrainedModel,
        names: StoredNames,
        leaves: Mapping[str, tuple[str, str]],
        assemblies: Sequence[Assembly],
    ) -> None:
        """Takes a model, its checkpoint and the stored names.

        Args:
            assemblies: how parameters are made that are not stored as such.
            leaves: see StoredNames.read.
        """
        self._checkpoint, self._model, self._names = checkpoint, model, names
        self._leaves, self._assemblies = leaves, assemblies
        self._tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        self._text_paths = text_paths(model)
        self._used: set[str] = set()

    def layer(self, layer: nn.Module, prefix: str) -> tuple[dict[str, TensorRange], list[Assembly]]:
        """One decoder layer's tensors by name inside the layer, and the conversions they need."""
        found: dict[str, TensorRange] = {}
        made = [each for each in self._assemblies if each.first.startswith(prefix)]
        targets = set()
        for each in made:
            for name in each.names:
                found[_PIECE + name] = self._checkpoint.tensors[name]
            targets |= each.targets()
            self._used.update(each.names)
        for name, parameter in own_tensors(layer):
            if prefix + name not in targets:
                found[name] = self._find(prefix + name, parameter)
        return found, made

    def resident(self, layers_prefix: str) -> dict[str, TensorRange]:
        """The tensors outside the layers that text needs, by name in the model."""
        return {
            name: self._find(name, parameter)
            for name, parameter in text_tensors(self._model)
            if not name.startswith(layers_prefix) and name not in self._tied
        }

    def unused(self) -> dict[str, str]:
        """Tensors that were not looked up -> reason; to be called after all look-ups.

        Raises:
            CheckpointError: a tensor of the part that reads and writes text was not looked up, and
                no reason is known.
        """
        places = {name: place for place, name in self._names.plain.items()}
        for conversion in self._assemblies:
            places |= dict.fromkeys(conversion.names, conversion.first)
        found = {}
        for name in self._checkpoint:
            if name in self._used:
                continue
            reason = self._names.unused.get(name) or self._reason(name, places[name])
            if reason is None:
                raise CheckpointError(
                    f"{self._checkpoint.folder}: tensor '{name}' is '{places[name]}' of a "
                    f"{self._model.config.model_type} model, a part that is not run here. Use a "
                    "model without it"
                )
            found[name] = reason
        return found

    def _reason(self, name: str, place: str) -> str | None:
        """Why a tensor with a place in the model was not looked up; None if no reason is known."""
        if place in self._tied:
            return f"tied to {self._tied[place]}"
        if any(not path or place.startswith(f"{path}.") for path in self._text_paths):
            return _LEAF if name in self._leaves else None
        return OTHER_PART

    def _of_fused(self, name: str, parameter: Tensor) -> TensorRange | None:
        """An expert's part of a tensor that holds all experts; None if there is no such tensor.

        The tensor's first dimension counts experts. If the model has `gate` and `up` separately,
        the rows of `gate` come before those of `up`.

        Raises:
            CheckpointError: the tensor of all experts has another shape than the config says.
        """
        of_expert = _OF_EXPERT.fullmatch(name)
        if of_expert is None or name in self._names.plain:
            return None
        linear, is_bias = of_expert["linear"], of_expert["leaf"] == "bias"
        fused = f"{of_expert['block']}.{'down_proj' if linear == 'down' else 'gate_up_proj'}"
        fused += "_bias" if is_bias else ""
        tensor = self._checkpoint.tensors.get(self._names.plain.get(fused, ""))
        if tensor is None:
            return None
        halves = 2 if linear in ("gate", "up") else 1
        each, index = (halves * parameter.shape[0], *parameter.shape[1:]), int(of_expert["index"])
        if tensor.shape[1:] != each or index >= tensor.shape[0]:
            raise CheckpointError(
                f"{tensor.path}: tensor '{tensor.name}' has shape {list(tensor.shape)}, "
                f"config.json asks for [experts, {', '.join(map(str, each))}]. Are both files of "
                "the same model?"
            )
        self._used.add(tensor.name)
        # rows() counts rows along the last dimension; a bias is one row
        rows = 1 if is_bias else parameter.shape[0]
        first = halves * rows * index + (rows if linear == "up" else 0)
        return replace(tensor.rows(first, rows), shape=tuple(parameter.shape))

    def _find(self, name: str, parameter: Tensor) -> TensorRange:
        if (part := self._of_fused(name, parameter)) is not None:
            return part
        stored = self._names.plain.get(name, name)
        tensor = self._checkpoint.tensors.get(stored)
        if tensor is None and name in self._tied:  # layers that share their weights (Zamba)
            shared = self._tied[name]
            tensor = self._checkpoint.tensors.get(self._names.plain.get(shared, shared))
            stored = stored if tensor is None else tensor.name
        if tensor is None:
            raise CheckpointError(
                f"{self._checkpoint.folder}: tensor '{stored}' is missing. "
                "The download may be incomplete, or config.json belongs to another model"
            )
        self._used.add(stored)
        if tensor.shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{tensor.path}: tensor '{stored}' has shape {list(tensor.shape)}, config.json "
                f"says {list(parameter.shape)}. Are both files of the same model?"
            )
        if parameter.dtype in _FLOAT_DTYPES and tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{tensor.path}: tensor '{stored}' is stored as {tensor.dtype}, not as one of "
                f"{', '.join(_FLOATS)}. Is it quantized in a way that config.json does not tell?"
            )
        return tensor
