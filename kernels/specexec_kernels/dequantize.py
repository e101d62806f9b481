"""Dequantize a packed weight: the PyTorch reference and the Triton kernel.

W[k, n] = scales[g, n] * (code[k, n] - zero[g, n]) with g = g_idx[k], or k // group_size.
Source: GPTQ, arXiv:2210.17323; AWQ, arXiv:2306.00978; layouts in specexec_kernels.packing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specexec_kernels.packing import PackedWeight, unpack_awq, unpack_rows, unpack_zeros


def dequantize_ref(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """(inputs, outputs) weight in `dtype`; computed in float32, where fp16 scales are exact."""
    fmt = weight.format
    codes = unpack_awq(weight.qweight) if fmt.awq else unpack_rows(weight.qweight, fmt.bits)
    group = weight.group_index().long()
    zeros = unpack_zeros(weight.qzeros, fmt)[group]
    return (weight.scales.float()[group] * (codes - zeros).float()).to(dtype)


def dequantize_by_slabs(weight: PackedWeight, dtype: torch.dtype, inputs: int = 128) -> Tensor:
    """As dequantize_ref, `inputs` (a multiple of 32) at a time.

    The reference holds several 8-byte integers for each weight at once: 8 GB for a matrix of a 70B
    model, where this takes 1/64 of it besides the result.
    """
    out = torch.empty(
        weight.in_features, weight.out_features, dtype=dtype, device=weight.qweight.device
    )
    groups = weight.group_index()
    for start in range(0, weight.in_features, inputs):
        stop = min(start + inputs, weight.in_features)
        first, last = start, stop
        if not weight.format.awq:  # rows of words
            first, last = start * weight.format.bits // 32, stop * weight.format.bits // 32
        slab = replace(
            weight, in_features=stop - start, qweight=weight.qweight[first:last],
            g_idx=groups[start:stop],
        )  # fmt: skip
        out[start:stop] = dequantize_ref(slab, dtype)
    return out
