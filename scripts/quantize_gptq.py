"""Round-to-nearest quantization into the GPTQ layout, for rigs, demos and tests.

For each output and group of inputs, scale = 2 * max|w| / (2**bits - 1), zero = 2**(bits - 1) and
code = clamp(round(w / scale) + zero). That is symmetric quantization as in GPTQ (arXiv:2210.17323)
without its error correction. Scales are rounded to float16 before the codes are chosen.
"""

from __future__ import annotations

import torch
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import pack_rows, store_zeros
from torch import Tensor


def round_to_nearest(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Quantizes a weight by rounding to nearest.

    Args:
        weight: (outputs, inputs), any float dtype.
        bits: bits of a code.
        group_size: inputs per group; the last group may be shorter.
    Returns:
        codes (outputs, inputs) int32 in [0, 2**bits), scales (outputs, groups) float16.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // group_size)
    padded = torch.zeros(outputs, groups * group_size)
    padded[:, :inputs] = weight
    grouped = padded.view(outputs, groups, group_size)
    scales = (2 * grouped.abs().amax(-1) / (2**bits - 1)).half()
    scales[scales == 0] = 1.0  # any scale will do for a group of zeros
    codes = torch.round(grouped / scales.float().unsqueeze(-1)) + 2 ** (bits - 1)
    codes = codes.clamp(0, 2**bits - 1).int().view(outputs, -1)
    return codes[:, :inputs], scales


def quantize(weight: Tensor, fmt: Gptq) -> PackedWeight:
    """Packs a weight (outputs, inputs) by rounding to nearest."""
    outputs, inputs = weight.shape
    codes, scales = round_to_nearest(weight, fmt.bits, fmt.group)
    zeros = torch.full((scales.shape[1], outputs), 2 ** (fmt.bits - 1))
    tensors = {
        "qweight": pack_rows(codes.T, fmt.bits),
        "qzeros": store_zeros(zeros, fmt.bits, minus_one=fmt.stored_minus_one),
        "scales": scales.T.contiguous(),
    }
    return PackedWeight(fmt, inputs, outputs, tensors)
