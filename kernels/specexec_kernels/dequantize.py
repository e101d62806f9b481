"""Dequantize a packed weight: the PyTorch reference and the Triton kernel.

W[k, n] = scales[g, n] * (code[k, n] - zero[g, n]) with g = g_idx[k], or k // group_size.
Source: GPTQ, arXiv:2210.17323; AWQ, arXiv:2306.00978; layouts in specexec_kernels.packing.
"""

from __future__ import annotations

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
