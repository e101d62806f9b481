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

from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import pack_rows, store_zeros

_RANGES = (1.0, 0.85, 0.7, 0.55)  # shares of a group's range that fitting begins with
# Weights that are fitted at a time; fitting takes a handful of float32 tensors of this size.
_BLOCK_WEIGHTS = 1 << 21
_LEAST_SCALE = 2.0**-24  # the smallest positive float16


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized weight, W (outputs, inputs) = scales[g] * (codes - zeros[g])."""

    codes: Tensor  # (outputs, inputs) int32 in [0, 2**bits)
    zeros: Tensor  # (outputs, groups) int32 in [0, 2**bits)
    scales: Tensor  # (outputs, groups) float16

    def weight(self) -> Tensor:
        """The weight that the codes stand for, (outputs, inputs) float32."""
        outputs, inputs = self.codes.shape
        grouped = self.codes.view(outputs, self.scales.shape[1], -1) - self.zeros.unsqueeze(-1)
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
    rows, inputs = weight.shape
    grouped = weight.float().reshape(rows, inputs // group_size, group_size)
    shares = torch.ones(inputs) if importance is None else importance
    shares = shares.view(-1, group_size)
    shares = shares / shares.mean(-1, keepdim=True)
    best, top = _Best(grouped, bits, shares), 2**bits - 1
    lowest, highest = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    # the scale and zero point of quantize.py's round-to-nearest
    nearest = _storable(2 * torch.maximum(-lowest, highest) / top)
    best.meet(nearest, torch.full_like(nearest, 2 ** (bits - 1)))
    for share in _RANGES:
        scale = _storable(share * (highest - lowest) / top)
        zero = (-share * lowest / scale).round().clamp(0, top)
        steps = best.meet(scale, zero)
        fitted = (grouped * steps * shares).sum(-1)
        fitted /= (steps.square() * shares).sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
        moved = ((steps + zero.unsqueeze(-1) - grouped / scale.unsqueeze(-1)) * shares).mean(-1)
        best.meet(_storable(torch.where(fitted > 0, fitted, scale)), moved.round().clamp(0, top))
    return Codes(best.codes.int().view(rows, inputs), best.zeros.int(), best.scales.half())


class _Best:
    """The codes with the least squared error so far, for each group by itself."""

    def __init__(self, weight: Tensor, bits: int, shares: Tensor) -> None:
        """Begins without any codes.

        Args:
            weight: (rows, groups, group_size) float32.
            bits: bits of a code.
            shares: (groups, group_size) float32, by which squared errors count.
        """
        groups = weight.shape[:2]
        self._weight, self._top, self._shares = weight, 2**bits - 1, shares
        self._error = torch.full(groups, float("inf"))
        self.codes = torch.zeros(weight.shape, dtype=torch.uint8)
        self.zeros = torch.zeros(groups)
        self.scales = torch.ones(groups)

    def meet(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Rounds with a scale and a zero point, and keeps the codes where they are the best so far.

        Args:
            scale, zero: (rows, groups) float32; the scale must be exact in float16.
        Returns:
            code - zero, (rows, groups, group_size).
        """
        wide, offset = scale.unsqueeze(-1), zero.unsqueeze(-1)
        codes = (self._weight / wide).round_().add_(offset).clamp_(0, self._top)
        steps = codes - offset
        squared = (self._weight - wide * steps).square_().mul_(self._shares).sum(-1)
        better = squared < self._error
        self._error = torch.where(better, squared, self._error)
        self.zeros = torch.where(better, zero, self.zeros)
        self.scales = torch.where(better, scale, self.scales)
        self.codes = torch.where(better.unsqueeze(-1), codes.to(torch.uint8), self.codes)
        return steps


def _storable(scale: Tensor) -> Tensor:
    """A scale rounded to float16 and back to float32; at least the smallest positive float16."""
    return scale.clamp(_LEAST_SCALE, torch.finfo(torch.float16).max).half().float()
