"""GPTQ: quantization that keeps a layer's outputs close on a calibration text.

The inputs of a linear are correlated, so other columns of a weight can make up for part of the
error of rounding one column. Columns are rounded one after another, and each one's error is
distributed to the columns that are still to come, by their correlation in the text.

Source: Frantar et al., arXiv:2210.17323, algorithm 1. Scales and zero points are those of
fitted.py, fitted to a group when its turn comes, errors so far included. There a column's squared
error counts by what rounding it will cost once the columns behind it have made up for their part,
the algorithm's 1 / [H^-1]_qq: with columns alike, small inputs take as much care as large ones, and
the KL divergence of 3 bits is a third larger (docs/tried.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specexec_kernels.fitted import Codes, fit
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import pack_rows, store_zeros

# The share of the mean second moment that is added to each input's (section 3.3). The next share is
# tried where rounding errors leave the moments without a Cholesky factor.
_DAMPINGS = (0.01, 0.1, 1.0)
_COLUMNS = 8  # whose errors are distributed together to all that follow


def quantize_calibrated(weight: Tensor, moments: Tensor, fmt: Gptq) -> PackedWeight:
    """Packs a weight, calibrated on a text.

    Args:
        weight: (outputs, inputs), any float dtype.
        moments: (inputs, inputs) float32, the sum of x x^T over the text's rows x.
        fmt: GPTQ format; its groups must divide the inputs.
    """
    found = calibrated(weight, moments, fmt.bits, fmt.group)
    tensors = {
        "qweight": pack_rows(found.codes.T, fmt.bits),
        "qzeros": store_zeros(found.zeros.T, fmt.bits, minus_one=fmt.stored_minus_one),
        "scales": found.scales.T.contiguous(),
    }
    return PackedWeight(fmt, weight.shape[1], weight.shape[0], tensors)


def calibrated(weight: Tensor, moments: Tensor, bits: int, group_size: int) -> Codes:
    """Codes, zero points and scales of a weight.

    Args:
        weight, moments: as for `quantize_calibrated`.
        bits: bits of a code.
        group_size: inputs of a group; divides the inputs.
    """
    left = weight.float().T.contiguous()  # columns still to be rounded, with errors distributed
    factor, top = _factor(moments), 2**bits - 1
    importance = factor.diagonal().square().reciprocal()
    codes, zeros, scales = torch.empty(left.shape, dtype=torch.int32), [], []
    for first in range(0, len(left), group_size):
        end = first + group_size
        grid = fit(left[first:end].T, bits, group_size, importance[first:end])
        zeros.append(grid.zeros)
        scales.append(grid.scales)
        zero, scale = grid.zeros[:, 0], grid.scales[:, 0].float()
        steps = _rounded(left[first:end], factor[first:end, first:end], scale, -zero, top - zero)
        codes[first:end] = steps.int() + zero
        left[end:].addmm_(factor[first:end, end:].T, left[first:end], alpha=-1)
    return Codes(codes.T.contiguous(), torch.cat(zeros, 1), torch.cat(scales, 1))


def _rounded(columns: Tensor, factor: Tensor, scale: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """Rounds the columns of a group, and leaves their errors in their place.

    A column's error goes to the next few columns at once, to the others together with theirs.

    Args:
        columns: (inputs, outputs) float32.
        factor: (inputs, inputs), the group's part of the Cholesky factor.
        scale, least, most: (outputs,); of a rounded column, and its bounds in scales.
    Returns:
        The columns in scales, (inputs, outputs) whole numbers.
    """
    count, steps = len(columns), torch.empty_like(columns)
    least, most = least.float(), most.float()
    diagonal = factor.diagonal().tolist()
    for first in range(0, count, _COLUMNS):
        end = min(first + _COLUMNS, count)
        for column in range(first, end):
            error = columns[column]
            step = torch.div(error, scale, out=steps[column]).round_().clamp_(least, most)
            error.addcmul_(step, scale, value=-1).div_(diagonal[column])
            columns[column + 1 : end].addr_(factor[column, column + 1 : end], error, alpha=-1)
        columns[end:].addmm_(factor[first:end, end:].T, columns[first:end], alpha=-1)
    return steps


def _factor(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped moments, (inputs, inputs).

    Damping also gives a moment to an input that is zero throughout the text. If all inputs are
    zero, or a moment is not finite, this is the identity: inputs count as independent.
    """
    mean = float(moments.diagonal().mean())
    for share in _DAMPINGS if 0.0 < mean < float("inf") else ():
        damped = moments.clone()
        damped.diagonal().add_(share * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed and upper.isfinite().all():
                return upper
    return torch.eye(len(moments))
