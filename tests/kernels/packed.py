"""Random weights whose codes go down the inputs, for the kernel tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from specexec_kernels.formats.awq import Awq
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import pack_awq, pack_rows, store_zeros

_NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


def random_weight(
    fmt: Gptq | Awq,
    inputs: int,
    outputs: int,
    group_size: int,
    *,
    scale_dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> PackedWeight:
    """A packed weight with random codes, zero points, and (shuffled) groups."""
    rng = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group_size)
    codes = torch.randint(0, 2**fmt.bits, (inputs, outputs), generator=rng)
    zeros = torch.randint(0, 2**fmt.bits, (groups, outputs), generator=rng)
    scales = torch.rand(groups, outputs, generator=rng) * 0.02 + 0.001
    tensors = {"scales": scales.to(scale_dtype)}
    if isinstance(fmt, Awq):
        tensors |= {"qweight": pack_awq(codes), "qzeros": pack_awq(zeros)}
    else:
        stored = store_zeros(zeros, fmt.bits, minus_one=fmt.stored_minus_one)
        tensors |= {"qweight": pack_rows(codes, fmt.bits), "qzeros": stored}
        if fmt.shuffled:
            index = torch.randint(0, groups, (inputs,), generator=rng, dtype=torch.int32)
            tensors["g_idx"] = index
    fmt = replace(fmt, group=group_size, scale_dtype=_NAMES[scale_dtype])
    return PackedWeight(fmt, inputs, outputs, tensors)


def outputs_for(fmt: Gptq | Awq, outputs: int) -> int:
    """So many outputs at least, of which zero points are whole words."""
    multiple = fmt.unit
    return -(-outputs // multiple) * multiple


V1_4BIT = Gptq(4, 0, stored_minus_one=True)
FORMATS: list[Gptq | Awq] = [
    *(Gptq(bits, 0, stored_minus_one=v1) for bits in (2, 3, 4, 8) for v1 in (False, True)),
    *(Gptq(bits, 0, stored_minus_one=True, shuffled=True) for bits in (2, 3, 4, 8)),
    Awq(0),
]
