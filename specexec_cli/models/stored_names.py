"""What a checkpoint calls the parameters of a model: transformers' own table of renamings, applied
to the names alone.

Checkpoints name their tensors as their makers did: with other prefixes, every expert apart, or two
matrices in one. transformers knows these names (its conversion_mapping) and converts the tensors
when it loads them. A streamed layer is never loaded, so here the names are turned round instead:
which tensors a parameter is made of, and how, where it is more than another name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn

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

from specexec_cli.errors import CheckpointError
from specexec_cli.offload.store import Checkpoint

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# a linear of one expert, of types whose own checkpoints have all experts in one tensor
_LINEAR_APART = re.compile(
    r"(?P<block>.+\.experts)\.(?P<index>\d{1,9})\.(?P<linear>gate_up|gate|up|down)\.(?P<leaf>\w+)"
)
# what older versions of transformers saved, and every model computes for itself
_BUFFERS = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|position_ids)$"
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Parameters that are made of stored tensors of another shape."""

    converter: WeightConverter
    first: str  # the parameter that transformers names the conversion by
    sources: dict[str, list[str]]  # transformers' pattern -> names in the checkpoint, in order

    @property
    def names(self) -> list[str]:
        """Every tensor it needs, by its name in the checkpoint."""
        return [name for names in self.sources.values() for name in names]

    def parameters(self, stored: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """The parameters by name in the model.

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
        """The parameters that come of it, by name in the model."""
        first, *others = self.converter.target_patterns
        return {self.first, *(self.first.replace(first, other) for other in others)}

    @property
    def stacks_experts(self) -> bool:
        """Whether it does nothing but put the matrices of all experts into one tensor."""
        kinds = [type(operation) for operation in self.converter.operations]
        return kinds in ([MergeModulelist], [MergeModulelist, Concatenate])

    def transposes(self, stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool | None:
        """Whether matrices that lie in one tensor are transposed to become a parameter.

        Args:
            stored: the tensor's shape, matrices in its last two dimensions.
            wanted: the parameter's.
        Returns:
            None where something else is done to it.
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
    """Every tensor of a checkpoint is in one of the first three."""

    plain: dict[str, str]  # parameter, or module + "." + leaf of a packed weight -> stored name
    conversions: list[Conversion]
    unused: dict[str, str]  # stored name -> why nothing takes it
    # modules of all experts whose linears are in `plain`, as PerExpert names them, each with
    # (expert, linear)
    apart: dict[str, set[tuple[int, str]]]

    @classmethod
    def read(
        cls,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        leaves: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> StoredNames:
        """Names of a model as transformers builds it, before any module is replaced.

        Args:
            leaves: tensors of packed linears -> (name of the linear, leaf).
        Raises:
            CheckpointError: a tensor belongs to nothing in the model, or two to the same place.
        """
        expected = dict.fromkeys(model.state_dict(), True)
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {p: each for each in converters for p in each.source_patterns}
        plain: dict[str, str] = {}
        unused: dict[str, str] = {}
        unknown: list[str] = []
        converted: dict[str, Conversion] = {}
        apart: dict[str, set[tuple[int, str]]] = {}
        taken = _Places(model, checkpoint)
        for name in checkpoint:
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
                # it takes one tensor, or its packed leaves, for each pattern and expert
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
            raise CheckpointError(
                f"{checkpoint.folder}: tensor '{unknown[0]}' belongs to nothing in a "
                f"{model.config.model_type} model ({len(unknown)} such). Is config.json of "
                "another model, or newer than the installed transformers?"
            )
        for conversion in converted.values():
            if conversion.first in plain:
                taken.refuse(plain[conversion.first], conversion.names[0], conversion.first)
            for names in conversion.sources.values():
                names.sort(key=_by_number)
        return cls(plain, list(converted.values()), unused, apart)


class _Places:
    """Which tensor has each place in a model, so that none takes that of another in silence."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._model_type, self._folder = model.config.model_type, checkpoint.folder
        self._names: dict[str, str] = {}

    def by(self, name: str, place: str, shown: str | None = None) -> str:
        """Gives a place to the tensor `name`, and returns that name.

        Args:
            shown: the place as messages have it, where that is another.
        Raises:
            CheckpointError: another tensor has it already.
        """
        first = self._names.setdefault(place, name)
        if first is not name:
            self.refuse(first, name, shown or place)
        return name

    def refuse(self, first: str, second: str, place: str) -> NoReturn:
        """
        Raises:
            CheckpointError: always; it says which two tensors are for one place.
        """
        raise CheckpointError(
            f"{self._folder}: tensors '{first}' and '{second}' are both '{place}' of a "
            f"{self._model_type} model, and only one can be. Are files of two downloads mixed?"
        )


def _reason(model: PreTrainedModel, stored: str, found: str) -> str | None:
    """Why a tensor that no parameter is made of is of no use; None where that is not known."""
    patterns = [
        pattern
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for pattern in module._keys_to_ignore_on_load_unexpected or ()
    ]
    if any(re.search(pattern, name) for pattern in patterns for name in (stored, found)):
        return "transformers' modelling code leaves it out"
    return "computed, not loaded" if _BUFFERS.search(stored) else None


def _by_number(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def expert_places(conversion: Conversion, leaves: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Names such as `3.gate.weight` of a stack of experts -> names in the checkpoint.

    Args:
        leaves: see StoredNames.read.
    Raises:
        ValueError: the conversion stacks something else.
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
