"""Round-to-nearest quantization into the GPTQ layout: our own packer, for rigs, demos and tests.

scale = 2 * max|w| / (2**bits - 1) per output and group of inputs, zero point 2**(bits - 1),
code = clamp(round(w / scale) + zero): symmetric quantization as in GPTQ (arXiv:2210.17323) without
its error correction. Scales are rounded to fp16 before the codes are chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specexec_kernels.packing import PackedFormat, PackedWeight, pack_rows, store_zeros


def round_to_nearest(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight.

    Args:
        weight: (outputs, inputs), any float dtype.
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


def quantize(weight: Tensor, fmt: PackedFormat, group_size: int) -> PackedWeight:
    """Pack a weight (outputs, inputs) in the GPTQ format `fmt`."""
    outputs, inputs = weight.shape
    codes, scales = round_to_nearest(weight, fmt.bits, group_size)
    zeros = torch.full((scales.shape[1], outputs), 2 ** (fmt.bits - 1))
    return PackedWeight(
        format=fmt,
        in_features=inputs,
        out_features=outputs,
        group_size=group_size,
        qweight=pack_rows(codes.T, fmt.bits),
        qzeros=store_zeros(zeros, fmt),
        scales=scales.T.contiguous(),
    )
