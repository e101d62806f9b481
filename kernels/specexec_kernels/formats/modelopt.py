"""NVIDIA's Model Optimizer: FP8 with one scale for the tensor, and NVFP4.

Source: https://github.com/NVIDIA/Model-Optimizer (unified checkpoints for the hub).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specexec_kernels.formats import register
from specexec_kernels.formats.base import CACHE_SCALES, Method, PackedFormat, Stored
from specexec_kernels.formats.fp4 import Fp4
from specexec_kernels.formats.fp8 import KINDS, read_fp8

_NVFP4_GROUP = 16


def _read(stored: Stored, settings: Mapping[str, Any]) -> PackedFormat | None:
    if "weight" not in stored.tensors or "weight_scale" not in stored.tensors:
        return None
    dtype = stored.dtype("weight")
    if dtype in KINDS:
        return read_fp8(stored, {})
    if dtype != "U8":
        return None
    stored.shape("weight_scale_2")
    return Fp4(
        stored.unit_of(_NVFP4_GROUP, 16), _NVFP4_GROUP, codes="weight",
        scale_dtype=stored.dtype("weight_scale", "F8_E4M3"), factor="weight_scale_2",
    )  # fmt: skip


METHOD = Method(
    name="modelopt",
    leaves=("weight", "weight_scale", "weight_scale_2"),
    unused=("input_scale", *CACHE_SCALES),
    read=_read,
    quantizes_rows=lambda settings: True,
)
register(METHOD)
