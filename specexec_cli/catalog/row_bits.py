"""How many bits a weight of a packed format takes, from quantization_config alone.

For sizes before anything is downloaded; what is here is counted from its headers. Torch-free; the
formats themselves are specexec_kernels.formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specexec_cli.errors import ConfigError


def row_bits(quantization: Mapping[str, Any], inputs: int) -> float | None:
    """Bits of one weight of a linear, its share of the scales included; None for other methods.

    Args:
        inputs: of the linear, which is a group where the config names none.
    Raises:
        ConfigError: the config's values make no sense.
    """
    name = str(quantization.get("quant_method")).lower()
    if name not in _METHODS:
        return None
    try:
        bits = _METHODS[name](quantization, inputs)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ConfigError(
            f"quantization_config of method {name} makes no sense: {error}"
        ) from error
    if not 0 < bits <= 64:
        raise ConfigError(f"quantization_config of method {name} asks for {bits:g} bits a weight")
    return bits


def packs_experts_alone(quantization: Mapping[str, Any]) -> bool:
    """Whether linears that are no expert's stay plain, as in gpt-oss's own checkpoints."""
    return str(quantization.get("quant_method")).lower() == "mxfp4"


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
