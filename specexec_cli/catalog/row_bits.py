"""The bytes of a packed matrix, and the bits of one of its weights, from quantization_config alone.

Needed before a model is downloaded; afterwards the headers of its files tell. Knows no torch; the
formats themselves are specexec_kernels.formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from specexec_cli.catalog.packed_formats import PACKED_KINDS
from specexec_cli.errors import ConfigError


def packed_bytes(quantization: Any, inputs: int, outputs: int) -> int | None:
    """Bytes of a packed matrix: codes, scales, zero points and the groups of its inputs.

    Args:
        quantization: config.json's quantization_config; None where it has none.
    Returns:
        None if the matrix is not packed.
    Raises:
        ConfigError: the config's values make no sense.
    """
    if not quantization:
        return None
    with _sensible(quantization):
        bits = row_bits(quantization, inputs)
        if bits is not None:
            return math.ceil(inputs * outputs * bits / 8)
        bits = _whole(quantization.get("bits") or 0, 64)
        group = quantization.get("group_size") or -1
        groups = 1 if group == -1 else -(-inputs // _whole(group, 1 << 31))
        kind = PACKED_KINDS.get(str(quantization.get("quant_method")))
    if not bits:
        return None
    group_index = 4 * inputs if kind is not None and "g_idx" in kind.tensors else 0
    return (
        inputs * outputs * bits // 8
        + groups * outputs * 2
        + groups * outputs * bits // 8
        + (group_index)
    )


def row_bits(quantization: Mapping[str, Any], inputs: int) -> float | None:
    """Bits of one weight of a linear, with its share of the scales; None for GPTQ and its kin.

    Args:
        inputs: of the linear, which is a group where the config names none.
    Raises:
        ConfigError: the config's values make no sense.
    """
    with _sensible(quantization):
        name = str(quantization.get("quant_method")).lower()
        bits = _METHODS[name](quantization, inputs) if name in _METHODS else None
        if bits is not None and not 0 < bits <= 64:
            raise ValueError(f"{bits:g} bits a weight")
    return bits


@contextmanager
def _sensible(quantization: Any) -> Iterator[None]:
    """Tells of values that a quantization_config should not have, in one line."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        name = quantization.get("quant_method") if isinstance(quantization, Mapping) else "?"
        raise ConfigError(
            f"quantization_config of method {name} makes no sense: {error}"
        ) from error


def _whole(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:60]} is no size")
    return value


def packs_experts_alone(quantization: Any) -> bool:
    """Whether only experts are packed, as in gpt-oss's own checkpoints."""
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    return str(method).lower() == "mxfp4"


def _fp8(quantization: Mapping[str, Any], inputs: int) -> float:
    block = quantization.get("weight_block_size") or (1, inputs)
    return 8 + 32 / (block[0] * block[1])


def _modelopt(quantization: Mapping[str, Any], inputs: int) -> float:
    return 4 + 8 / 16 if "NVFP4" in str(quantization.get("quant_algo")) else 8.0


def _mxfp4(quantization: Mapping[str, Any], inputs: int) -> float:
    return 4 + 8 / 32


def _bitsandbytes(quantization: Mapping[str, Any], inputs: int) -> float:
    if quantization.get("load_in_8bit"):
        return 8 + 32 / inputs
    nested = quantization.get("bnb_4bit_use_double_quant")
    return 4 + (8 + 32 / 256 if nested else 32) / 64


def _compressed_tensors(quantization: Mapping[str, Any], inputs: int) -> float:
    groups = list((quantization.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if groups else {}
    bits = int(weights.get("num_bits") or 16)
    group = int(weights.get("group_size") or inputs)
    if weights.get("strategy") == "tensor":
        return bits  # and one scale for all
    if weights.get("type") == "float" and bits == 4:
        return bits + 8 / group  # MXFP4 and NVFP4 have scales of one byte
    return bits + (16 + (0 if weights.get("symmetric", True) else bits)) / group


_METHODS: Mapping[str, Callable[[Mapping[str, Any], int], float]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
}
