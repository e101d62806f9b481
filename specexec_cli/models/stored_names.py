"""Finds the checkpoint's names for a model's parameters, by transformers' own table of renamings.

Checkpoints keep the names of their authors: with other prefixes, with every expert separate, or
with two matrices in one tensor. transformers knows these names (its conversion_mapping) and
converts the tensors when it loads a model. A streamed model is never loaded, so this module applies
the table to names alone: for each parameter it finds the tensors that the parameter is made of and,
if there is more than a renaming, the conversion.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn, Protocol

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from specexec_cli.catalog.architectures import is_unread_index
from specexec_cli.errors import CheckpointError
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.mtp import behind_last
from specexec_cli.planning.built_sizes import text_paths

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# one expert's linear, in model types whose usual checkpoints have all experts in one tensor
_LINEAR_APART = re.compile(
    r"(?P<block>.+\.experts)\.(?P<index>\d{1,9})\.(?P<linear>gate_up|gate|up|down)\.(?P<leaf>\w+)"
)
# buffers that older versions of transformers saved, and that every model computes itself
_BUFFERS = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|position_ids)$"
)

UNUSED_INDEX = "of an index that picks the tokens a layer sees: it sees them all"
OTHER_PART = "not of the part that reads and writes text"


class Assembly(Protocol):
    """A way to make parameters of stored tensors that have other shapes."""

    @property
    def first(self) -> str:
        """The first parameter that is made, by its name in the model."""

    @property
    def names(self) -> list[str]:
        """The names in the checkpoint of all tensors that are needed."""

    def targets(self) -> set[str]:
        """The names in the model of all parameters that are made."""

    def parameters(self, stored: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Makes the parameters of tensors by their names; returns them by their names."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion of stored tensors to parameters of another shape."""

    converter: WeightConverter
    first: str  # the first parameter that is made, by its name in the model
    sources: dict[str, list[str]]  # transformers' pattern -> names in the checkpoint, in order

    @property
    def names(self) -> list[str]:
        """The names in the checkpoint of all tensors that the conversion needs."""
        return [name for names in self.sources.values() for name in names]

    def parameters(self, stored: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Makes the parameters; returns them by their names in the model.

        Args:
            stored: tensors by their names in the checkpoint.
        """
        converter = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.first, name, pattern, stored[name])
        made = converter.convert(self.first, model=model, config=model.config)
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()
        }

    def targets(self) -> set[str]:
        """The names in the model of all parameters that the conversion makes."""
        first, *others = self.converter.target_patterns
        return {self.first, *(self.first.replace(first, other) for other in others)}

    @property
    def stacks_experts(self) -> bool:
        """Whether the conversion only puts the matrices of all experts into one tensor."""
        kinds = [type(operation) for operation in self.converter.operations]
        return kinds in ([MergeModulelist], [MergeModulelist, Concatenate])

    def transposes(self, stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool | None:
        """Whether the conversion transposes the matrices of one tensor.

        Args:
            stored: shape of the tensor, with matrices in its last two dimensions.
            wanted: shape of the parameter.
        Returns:
            None if the conversion is anything but a transposition of one tensor's matrices.
        """
        operations = self.converter.operations
        if len(operations) != 1 or not isinstance(operations[0], Transpose):
            return None
        turn = operations[0]
        if {turn.dim0, turn.dim1} != {1, 2} or len(self.names) != 1:
            return None
        return not (turn.check_dims and stored == wanted)


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The uses of a checkpoint's tensors: each is in `plain`, `conversions` or `unused`."""

    plain: dict[str, str]  # parameter, or module + "." + leaf of a packed weight -> stored name
    conversions: list[Conversion]
    unused: dict[str, str]  # stored name -> why no parameter needs it
    # Fused modules whose experts the checkpoint stores separately -> the (expert, linear) pairs
    # found. Those linears are in `plain`, under PerExpert's names.
    apart: dict[str, set[tuple[int, str]]]

    @classmethod
    def read(
        cls,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        leaves: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        placed: Collection[str] = (),
    ) -> StoredNames:
        """Finds the names for a model as transformers builds it, before modules are replaced.

        Args:
            leaves: names of packed linears' tensors -> (name of the linear, leaf).
            placed: tensors whose use is known already.
        Raises:
            CheckpointError: a tensor belongs to nothing in the model, or two tensors belong to the
                same place.
        """
        expected = dict.fromkeys(model.state_dict(), True)
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {p: each for each in converters for p in each.source_patterns}
        plain, unused = dict[str, str](), dict[str, str]()
        unused |= dict.fromkeys(behind_last(checkpoint), "it predicts further tokens (MTP)")
        unknown: list[str] = []
        converted: dict[str, Conversion] = {}
        apart: dict[str, set[tuple[int, str]]] = {}
        taken = _Places(model, checkpoint)
        for name in (each for each in checkpoint if each not in placed and each not in unused):
            own = _LINEAR_APART.fullmatch(name)
            if own is not None and f"{own['block']}.gate_up_proj" in expected:
                index, linear = int(own["index"]), own["linear"]
                place = f"{own['block']}.experts.{index}.{linear}.{own['leaf']}"
                plain[place] = taken.by(name, place)
                apart.setdefault(own["block"], set()).add((index, linear))
                continue
            module, leaf = leaves.get(name, (None, ""))
            asked = name if module is None else f"{module}.weight"
            found, pattern = rename_source_key(
                asked, renamings, converters, model.base_model_prefix, expected
            )
            if pattern is not None and found in expected:
                conversion = converted.setdefault(found, Conversion(by_pattern[pattern], found, {}))
                # a conversion takes one tensor, or its packed leaves, for each pattern and expert
                taken.by(name, f"{found} {pattern} {_by_number(name)} {leaf}", shown=found)
                conversion.sources.setdefault(pattern, []).append(name)
            elif found in expected:
                place = found if module is None else f"{found.rpartition('.')[0]}.{leaf}"
                plain[place] = taken.by(name, place)
            elif reason := _reason(model, name, found):
                unused[name] = reason
            else:
                unknown.append(name)
        if unknown:
            taken.refuse_unknown(unknown)
        for conversion in converted.values():
            if conversion.first in plain:
                taken.refuse(plain[conversion.first], conversion.names[0], conversion.first)
            for names in conversion.sources.values():
                names.sort(key=_by_number)
        return cls(plain, list(converted.values()), unused, apart)


class _Places:
    """The tensor at each place in a model; a second tensor for the same place is an error."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._model_type, self._folder = model.config.model_type, checkpoint.folder
        self._names: dict[str, str] = {}

    def by(self, name: str, place: str, shown: str | None = None) -> str:
        """Gives a place to the tensor `name`, and returns that name.

        Args:
            shown: the place's name in messages; `place` if not given.
        Raises:
            CheckpointError: another tensor has the place already.
        """
        first = self._names.setdefault(place, name)
        if first is not name:
            self.refuse(first, name, shown or place)
        return name

    def refuse(self, first: str, second: str, place: str) -> NoReturn:
        """Reports two tensors that belong to the same place.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            f"{self._folder}: tensors '{first}' and '{second}' are both '{place}' of a "
            f"{self._model_type} model, and only one can be. Are files of two downloads mixed?"
        )

    def refuse_unknown(self, names: Sequence[str]) -> NoReturn:
        """Reports tensors that belong to nothing in the model.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            f"{self._folder}: tensor '{names[0]}' belongs to nothing in a {self._model_type} model "
            f"({len(names)} such). Is config.json of another model, or newer than the installed "
            "transformers?"
        )


def _reason(model: PreTrainedModel, stored: str, found: str) -> str | None:
    """Why the model does not need a tensor; None if no reason is known."""
    patterns = [
        pattern
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for pattern in module._keys_to_ignore_on_load_unexpected or ()
    ]
    if any(re.search(pattern, name) for pattern in patterns for name in (stored, found)):
        return "transformers' modelling code leaves it out"
    if is_unread_index(model.config.get_text_config(decoder=True).model_type, found):
        return UNUSED_INDEX
    if _BUFFERS.search(stored):
        return "computed, not loaded"
    return OTHER_PART if _in_other_part(model, found) else None


def _in_other_part(model: PreTrainedModel, name: str) -> bool:
    """Whether a tensor without a place lies in a module that text does not need.

    transformers takes modules out of such parts that stay in files: the means of pixels, say.
    """
    modules = {path for path, _ in model.named_modules()}
    path = name.rpartition(".")[0]
    while path not in modules:
        path = path.rpartition(".")[0]
    own, *text = (f"{each}." if each else "" for each in (path, *text_paths(model)))
    return not any(own.startswith(each) or each.startswith(own) for each in text)


def _by_number(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def expert_places(conversion: Conversion, leaves: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """The stored names of a stack of experts, by names such as `3.gate.weight`.

    Args:
        leaves: see StoredNames.read.
    Raises:
        ValueError: a tensor of the conversion is not that of one expert.
    """
    patterns = conversion.converter.source_patterns
    parts = ("down",) if len(patterns) == 1 else ("gate", "up")
    places = {}
    for pattern, part in zip(patterns, parts, strict=True):
        for name in conversion.sources.get(pattern, ()):
            found = _EXPERT.search(name)
            if found is None:
                raise ValueError(f"'{name}' is not the tensor of one expert")
            leaf = leaves[name][1] if name in leaves else name.rpartition(".")[2]
            places[f"{found[1]}.{part}.{leaf}"] = name
    return places
