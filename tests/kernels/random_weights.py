"""Random weights in every packed format, for the tests of kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from specexec_kernels.formats.awq import Awq
from specexec_kernels.formats.base import PackedFormat, PackedWeight
from specexec_kernels.formats.bitsandbytes import Table4
from specexec_kernels.formats.fp4 import Fp4
from specexec_kernels.formats.fp8 import Fp8
from specexec_kernels.formats.gguf import GGUF_FORMATS
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.formats.integers import Int8, PackedIntegers
from torch import Tensor

DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
    "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
TABLE = tuple(float(value) for value in torch.linspace(-1, 1, 16))

FORMATS: dict[str, PackedFormat] = {
    "fp8-block": Fp8(64, "F8_E4M3", "weight_scale_inv", "F32", (128, 128)),
    "fp8-channel": Fp8(64, "F8_E4M3", "weight_scale", "BF16", (1, 0)),
    "fp8-tensor": Fp8(16, "F8_E4M3", "weight_scale", "F32", (0, 0)),
    "fp8-powers-of-two": Fp8(64, "F8_E4M3", "weight_scale_inv", "F8_E8M0", (128, 128)),
    "fp8-powers-of-two-together": Fp8(64, "F8_E4M3", "weight_scale_inv", "F8_E8M0", (16, 16)),
    "fp8-e5m2": Fp8(4, "F8_E5M2", "weight_scale", "F32", (48, 64)),
    "fp8-tiles-together": Fp8(128, "F8_E4M3", "weight_scale_inv", "F32", (64, 64)),
    "fp8-e5m2-tiles-together": Fp8(64, "F8_E5M2", "weight_scale", "BF16", (12, 16)),
    "mxfp4": Fp4(64, 32),
    "mxfp4-words": Fp4(128, 32),
    "mxfp4-single": Fp4(32, 32),
    "nvfp4": Fp4(64, 16, scale_dtype="F8_E4M3", factor="weight_global_scale", divides=True),
    "nvfp4-modelopt": Fp4(16, 16, codes="weight", scale_dtype="F8_E4M3", factor="weight_scale_2"),
    "int4-group": PackedIntegers(4, 64, "BF16", zeros=False),
    "int4-channel": PackedIntegers(4, 0, "F16", zeros=False),
    "int4-zeros": PackedIntegers(4, 32, "BF16", zeros=True),
    "int4-zeros-together": PackedIntegers(4, 32, "BF16", zeros=True, unit=64),
    "int4-zeros-128": PackedIntegers(4, 128, "BF16", zeros=True, unit=128),
    "int8-zeros-channel": PackedIntegers(8, 0, "F32", zeros=True),
    "int3-group": PackedIntegers(3, 64, "BF16", zeros=False),
    "int3-zeros": PackedIntegers(3, 64, "BF16", zeros=True),
    "int4-shuffled": PackedIntegers(4, 64, "BF16", zeros=True, shuffled=True),
    "int4-shuffled-16": PackedIntegers(4, 16, "BF16", zeros=True, shuffled=True),
    "int8": Int8(64, "weight_scale", "BF16", (1, 0)),
    "int8-zeros": Int8(32, "weight_scale", "F32", (1, 64), zeros=True),
    "int8-group": Int8(64, "weight_scale", "BF16", (1, 32)),
    "int8-groups-together": Int8(128, "weight_scale", "F32", (1, 32)),
    "int8-zeros-together": Int8(64, "weight_scale", "BF16", (1, 16), zeros=True),
    "int8-zeros-96": Int8(32, "weight_scale", "F32", (1, 96), zeros=True),
    "int8-across-units": Int8(4, "weight_scale", "F32", (1, 6)),
    "int8-single": Int8(64, "weight_scale", "F32", (1, 1)),
    "int8-bitsandbytes": Int8(16, "SCB", "F32", (1, 0), factor=1 / 127),
    "nf4": Table4(64, TABLE, 64),
    "nf4-nested": Table4(64, TABLE, 64, nested_run=4, offset=0.25),
    "nf4-nested-together": Table4(64, TABLE, 16, nested_run=4, offset=0.25),
    "gptq-2": Gptq(2, 64, stored_minus_one=True),
    "gptq-3": Gptq(3, 64),
    "gptq-3-v1": Gptq(3, 0, "BF16", stored_minus_one=True),
    "gptq-4": Gptq(4, 128, stored_minus_one=True),
    "gptq-4-v2": Gptq(4, 32, "F32"),
    "gptq-4-shuffled": Gptq(4, 64, stored_minus_one=True, shuffled=True),
    "gptq-8": Gptq(8, 96, stored_minus_one=True),
    "gptq-8-shuffled": Gptq(8, 32, shuffled=True),
    "awq": Awq(64),
    "awq-channel": Awq(0, "BF16"),
}  # fmt: skip
V1_4BIT = Gptq(4, 0, stored_minus_one=True)
# formats whose codes go down the inputs, of all widths
DOWN: list[Gptq | Awq] = [
    *(Gptq(bits, 0, stored_minus_one=v1) for bits in (2, 3, 4, 8) for v1 in (False, True)),
    *(Gptq(bits, 0, stored_minus_one=True, shuffled=True) for bits in (2, 3, 4, 8)),
    Awq(0),
]


def random_weight(fmt: PackedFormat, outputs: int, inputs: int, seed: int = 0) -> PackedWeight:
    """A weight of the format; codes take every value that is a number, scales are near 1.

    Where codes go down the inputs it has more outputs, if the last ones would fill no word.
    """
    if fmt.goes_down:
        outputs = -(-outputs // fmt.unit) * fmt.unit
    rng = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for part in fmt.parts:
        shape = part.shape(outputs, inputs)
        dtype = DTYPES[part.dtype]
        if "g_idx" in part.leaf:
            group = torch.arange(inputs, dtype=torch.int32) // fmt.group  # type: ignore[attr-defined]
            tensor = group[torch.randperm(inputs, generator=rng)].view(shape)
        elif part.leaf == fmt.parts[0].leaf or "zero" in part.leaf:
            raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=rng).to(torch.uint8)
            tensor = raw.view(dtype).view(shape)
            if dtype.is_floating_point:
                finite = torch.isfinite(tensor.float()) & (tensor.float().abs() < 1e4)
                tensor = torch.where(finite, tensor.float(), 1.5).to(dtype)
        elif part.dtype == "U8":  # exponents, or codes of absmax
            tensor = torch.randint(124, 131, shape, generator=rng).to(torch.uint8)
        else:
            tensor = (torch.rand(shape, generator=rng) + 0.5).to(dtype)
        tensors[part.leaf] = tensor
    return PackedWeight(fmt, inputs, outputs, tensors)


def any_weight(name: str, outputs: int, inputs: int) -> PackedWeight:
    """A weight of a format of FORMATS or of a type of GGUF files."""
    if name in FORMATS:
        return random_weight(FORMATS[name], outputs, inputs)
    # with all bytes below 64, every float16 scale is below 2, wherever it lies
    fmt, rng = GGUF_FORMATS[name], torch.Generator().manual_seed(0)
    blocks = torch.randint(64, fmt.parts[0].shape(outputs, inputs), generator=rng)
    return PackedWeight(fmt, inputs, outputs, {"weight": blocks.to(torch.uint8)})


def down_weight(
    fmt: Gptq | Awq, inputs: int, outputs: int, group: int, seed: int = 0
) -> PackedWeight:
    """As random_weight, of a format with groups of so many inputs."""
    return random_weight(replace(fmt, group=group), outputs, inputs, seed)
