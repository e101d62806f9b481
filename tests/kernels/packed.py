"""Random packed weights for the kernel tests."""

from __future__ import annotations

import torch
from specexec_kernels.packing import PackedFormat, PackedWeight, pack_awq, pack_rows, store_zeros


def random_weight(
    fmt: PackedFormat,
    inputs: int,
    outputs: int,
    group_size: int,
    *,
    shuffled: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> PackedWeight:
    """A packed weight with random codes, zero points, and (shuffled) groups."""
    rng = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group_size)
    codes = torch.randint(0, 2**fmt.bits, (inputs, outputs), generator=rng)
    zeros = torch.randint(0, 2**fmt.bits, (groups, outputs), generator=rng)
    scales = torch.rand(groups, outputs, generator=rng) * 0.02 + 0.001
    g_idx = None
    if shuffled:
        g_idx = torch.randint(0, groups, (inputs,), generator=rng, dtype=torch.int32)
    return PackedWeight(
        format=fmt,
        in_features=inputs,
        out_features=outputs,
        group_size=group_size,
        qweight=pack_awq(codes) if fmt.awq else pack_rows(codes, fmt.bits),
        qzeros=store_zeros(zeros, fmt),
        scales=scales.to(scale_dtype),
        g_idx=g_idx,
    )


FORMATS = [
    *(PackedFormat(bits, stored_minus_one=v1) for bits in (2, 3, 4, 8) for v1 in (False, True)),
    PackedFormat(4, awq=True),
]
