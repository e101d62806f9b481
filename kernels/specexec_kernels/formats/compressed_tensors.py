"""compressed-tensors, as llm-compressor writes it: decides which format a linear's weight has.

`config_groups` of quantization_config are groups of linears, chosen by module name or class, each
with a description of its `weights`; `ignore` lists the linears that stay plain.
Source: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specexec_kernels.formats import register
from specexec_kernels.formats.base import CACHE_SCALES, SCALES, Method, PackedFormat, Stored
from specexec_kernels.formats.fp4 import Fp4
from specexec_kernels.formats.fp8 import KINDS, read_fp8
from specexec_kernels.formats.integers import Int8, PackedIntegers
from specexec_kernels.patterns import matches

_EXACT, _REGEX, _CLASS, _NONE = range(4)  # how a target matches a linear, the most exact way first
_CLASSES = ("Linear",)
_FOLDED = ("weight_input", "weight_output")  # transforms here are already in the stored weights


def _read(stored: Stored, settings: Mapping[str, Any]) -> PackedFormat | None:
    _check_transforms(settings)
    group = _group(stored.name, settings)
    if "weight_packed" in stored.tensors:
        if group is None:
            raise ValueError("it is packed, but no group of quantization_config has it")
        if stored.dtype("weight_packed") == "U8":
            return _fp4(stored, group)
        return _integers(stored, group)
    if "weight" not in stored.tensors or group is None:
        return None
    if stored.dtype("weight") in KINDS:
        _check_symmetric(group)
        return read_fp8(stored, {"weight_block_size": group.get("block_structure")})
    return _int8(stored, group) if stored.dtype("weight") == "I8" else None


def _group(name: str, settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `weights` of the group that a linear is in; None where it stays plain.

    Where several groups match, the most exact match counts, and of equals the first.
    """
    ignored = [_match(name, target) for target in _names(settings, "ignore")]
    if any(match in (_EXACT, _REGEX) for match in ignored):
        return None
    groups = _groups(settings)
    matches = [
        min((_match(name, target) for target in _names(group, "targets")), default=_NONE)
        for group in groups
    ]
    if min(matches) == _NONE:
        return None
    weights = groups[matches.index(min(matches))].get("weights")
    return weights if isinstance(weights, Mapping) else None


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    values = list(groups.values()) if isinstance(groups, Mapping) else []
    if not values or not all(isinstance(group, Mapping) for group in values):
        raise ValueError("quantization_config has no config_groups: download config.json again")
    return values


def _names(settings: Mapping[str, Any], key: str) -> list[str]:
    names = settings.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"quantization_config: {key} must be a list of names, not {names!r}")
    return names


def _match(name: str, target: str) -> int:
    """How exactly a target matches a linear: one of _EXACT, _REGEX, _CLASS and _NONE."""
    if target.startswith("re:"):
        try:
            return _REGEX if matches(target[3:], name) else _NONE
        except ValueError as error:
            raise ValueError(f"quantization_config: '{target}' is no regex: {error}") from None
    if name == target:
        return _EXACT
    return _CLASS if target in _CLASSES else _NONE


def _number(weights: Mapping[str, Any], key: str) -> int:
    value = weights.get(key)
    if type(value) is not int:
        raise ValueError(f"quantization_config: {key} must be a whole number, not {value!r}")
    return value


def _has_zeros(stored: Stored, weights: Mapping[str, Any]) -> bool:
    """Whether a linear has zero points.

    Raises:
        ValueError: its weights are asymmetric and it has none, or `symmetric` is no bool.
    """
    symmetric = weights.get("symmetric", True)
    if type(symmetric) is not bool:
        raise ValueError(f"quantization_config: symmetric must be a bool, not {symmetric!r}")
    if not symmetric:
        stored.dtype("weight_zero_point")
    return "weight_zero_point" in stored.tensors


def _check_symmetric(weights: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: the weights are asymmetric, which is supported for integers alone.
    """
    if weights.get("symmetric", True) is not True:
        raise ValueError("floats that are not symmetric are not supported")


def _check_transforms(settings: Mapping[str, Any]) -> None:
    """Accepts rotations that are already in the stored weights.

    Raises:
        ValueError: activations are to be rotated while the model runs, which is not supported.
    """
    transforms = settings.get("transform_config") or {}
    try:
        schemes = (transforms.get("config_groups") or {}).values()
        places = [apply["location"] for scheme in schemes for apply in scheme.get("apply") or ()]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"quantization_config: transform_config makes no sense: {error}") from None
    for place in places:
        if place not in _FOLDED:
            raise ValueError(
                f"quantization_config: transform_config rotates at '{place}' while the model runs, "
                "which is not supported: take a checkpoint without online transforms"
            )


def _scale_group(stored: Stored, weights: Mapping[str, Any]) -> int:
    """How many inputs share a scale; 0 stands for all of them."""
    strategy = weights.get("strategy")
    if strategy == "channel":
        return 0
    if strategy not in ("group", "tensor_group"):
        raise ValueError(f"quantization strategy '{strategy}' is not supported for packed weights")
    size = _number(weights, "group_size")
    if size < 1 or stored.inputs % size:
        raise ValueError(f"{stored.inputs} inputs are not whole groups of {size}")
    return size


def _integers(stored: Stored, weights: Mapping[str, Any]) -> PackedIntegers:
    bits = _number(weights, "num_bits")
    if weights.get("type") != "int" or not 1 <= bits <= 8:
        raise ValueError(f"words of {bits} bits of type '{weights.get('type')}' are not supported")
    return PackedIntegers(
        bits, _scale_group(stored, weights), stored.dtype("weight_scale", *SCALES),
        zeros=_has_zeros(stored, weights),
        # an index that names groups of neighbouring inputs, in order, is not needed
        shuffled="weight_g_idx" in stored.tensors and _is_shuffled(stored, weights),
        unit=stored.unit_of(_scale_group(stored, weights)),
    )  # fmt: skip


def _is_shuffled(stored: Stored, weights: Mapping[str, Any]) -> bool:
    size = _scale_group(stored, weights) or stored.inputs
    index = stored.load("weight_g_idx").reshape(-1).tolist()
    if len(index) != stored.inputs or not all(0 <= i < stored.inputs // size for i in index):
        raise ValueError("its weight_g_idx names groups that there are not: download it again")
    return any(group != number // size for number, group in enumerate(index))


def _int8(stored: Stored, weights: Mapping[str, Any]) -> Int8:
    sizes = [size for size in stored.shape("weight_scale") if size != 1]
    if weights.get("strategy") == "group":
        tile = 1, _scale_group(stored, weights)
    else:
        tile = (1, 0) if sizes else (0, 0)
    if "weight_g_idx" in stored.tensors and _is_shuffled(stored, weights):
        raise ValueError(
            "8-bit integers in activation order are read from pack-quantized checkpoints alone, "
            "not from int-quantized ones: take another, or the original weights"
        )
    unit = stored.unit_of(tile[1], 16, 4)
    return Int8(
        unit, "weight_scale", stored.dtype("weight_scale", *SCALES), tile,
        zeros=_has_zeros(stored, weights),
    )  # fmt: skip


def _fp4(stored: Stored, weights: Mapping[str, Any]) -> Fp4:
    _check_symmetric(weights)
    group = _scale_group(stored, weights)
    if group not in (16, 32):
        raise ValueError(f"groups of {group} 4-bit floats are not supported, 16 and 32 are")
    factor = ""
    if stored.dtype("weight_scale", "U8", "F8_E4M3") == "F8_E4M3":  # NVFP4
        factor = "weight_global_scale"
        stored.shape(factor)
    return Fp4(
        stored.unit_of(group, 16), group, scale_dtype=stored.dtype("weight_scale"),
        factor=factor, divides=True,
    )  # fmt: skip


METHOD = Method(
    name="compressed-tensors",
    leaves=("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx",
            "weight_global_scale"),
    unused=("weight_shape", "input_scale", "input_zero_point", "input_global_scale",
            "output_scale", *CACHE_SCALES),
    read=_read,
    quantizes_rows=lambda settings: any(
        group.get("input_activations") for group in _groups(settings)
    ),
)  # fmt: skip
register(METHOD)
