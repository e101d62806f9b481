"""Quantization that fits scale and zero point to each group of weights, without a text.

A group of weights w is stored as scale * (code - zero). Codes and zero point are computed in turns:

    code = clamp(round(w / scale) + zero)
    zero = round(mean(code - w / scale))

Source of these steps: HQQ (Badri and Shaji, 2023, "Half-Quadratic Quantization of Large Machine
Learning Models"). HQQ keeps the first scale. Here zero points are whole numbers, as GPTQ
checkpoints have them, so changing them alone helps little, and the scale is fitted too, by least
squares: scale = sum(w * (code - zero)) / sum((code - zero)^2). That begins from several ranges of
the group, because with few bits the best range leaves the largest weights out. HQQ also counts
errors by their 0.7th power, so that outliers weigh less; that made weights and text worse here
(docs/tried.md). The result with the least squared error is kept, round-to-nearest included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specexec_kernels import cpu_jit
from specexec_kernels.cpu_fit import fit_groups
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import pack_rows, store_zeros

# Weights that are fitted at a time; fitting takes two tensors of this size, of 32 bits each.
_BLOCK_WEIGHTS = 1 << 21


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized weight, W (outputs, inputs) = scales[g] * (codes - zeros[g])."""

    codes: Tensor  # (outputs, inputs) int32 in [0, 2**bits)
    zeros: Tensor  # (outputs, groups) int32 in [0, 2**bits)
    scales: Tensor  # (outputs, groups) float16

    def weight(self) -> Tensor:
        """The weight that the codes stand for, (outputs, inputs) float32."""
        outputs, inputs = self.codes.shape
        grouped = self.codes.reshape(outputs, self.scales.shape[1], -1) - self.zeros.unsqueeze(-1)
        return (self.scales.float().unsqueeze(-1) * grouped).view(outputs, inputs)


def quantize_fitted(weight: Tensor, fmt: Gptq) -> PackedWeight:
    """Packs a weight with scales and zero points fitted group by group.

    Args:
        weight: (outputs, inputs), any float dtype.
        fmt: GPTQ format; its groups must divide the inputs.
    """
    outputs, inputs = weight.shape
    # some outputs at a time, to save memory; the zero points of 32 outputs are whole words
    rows = max(32, _BLOCK_WEIGHTS // inputs // 32 * 32)
    codes, zeros, scales = [], [], []
    for first in range(0, outputs, rows):
        found = fit(weight[first : first + rows], fmt.bits, fmt.group)
        codes.append(pack_rows(found.codes.T, fmt.bits))
        zeros.append(store_zeros(found.zeros.T, fmt.bits, minus_one=fmt.stored_minus_one))
        scales.append(found.scales.T)
    tensors = {
        "qweight": torch.cat(codes, 1),
        "qzeros": torch.cat(zeros, 1),
        "scales": torch.cat(scales, 1),
    }
    return PackedWeight(fmt, inputs, outputs, tensors)


def fit(weight: Tensor, bits: int, group_size: int, importance: Tensor | None = None) -> Codes:
    """Codes, zero points and scales of a weight, fitted group by group.

    Args:
        weight: (outputs, inputs), any float dtype.
        bits: bits of a code.
        group_size: inputs of a group; divides the inputs.
        importance: (inputs,) positive float32, how much an input's squared error counts beside
            those of its group; None counts them alike.
    """
    inputs = weight.shape[1]
    shares = torch.ones(inputs) if importance is None else importance
    return codes_of(columns_of(weight), len(weight), bits, group_size, shares)


def columns_of(weight: Tensor) -> Tensor:
    """A weight column by column, (inputs, outputs) float32, with zeros as outputs up to a vector's
    end."""
    outputs, inputs = weight.shape
    columns = torch.zeros(inputs, outputs + -outputs % cpu_jit.lanes())
    columns[:, :outputs] = weight.T
    return columns


def codes_of(
    columns: Tensor,
    outputs: int,
    bits: int,
    group_size: int,
    importance: Tensor,
    factor: Tensor | None = None,
) -> Codes:
    """`fit` for a weight that lies column by column; see fit_groups for columns and factor."""
    shares = importance.view(-1, group_size)
    shares = (shares / shares.mean(-1, keepdim=True)).view(-1)
    codes, zeros, scales = fit_groups(columns, bits, group_size, shares, factor)
    return Codes(codes[:, :outputs].T, zeros[:, :outputs].T, scales[:, :outputs].T.half())
