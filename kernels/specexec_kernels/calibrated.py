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

from specexec_kernels.fitted import Codes, codes_of, columns_of
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import pack_rows, store_zeros

# The share of the mean second moment that is added to each input's (section 3.3). The next share is
# tried where rounding errors leave the moments without a Cholesky factor.
_DAMPINGS = (0.01, 0.1, 1.0)


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
    factor, importance = _factor(moments)
    return codes_of(columns_of(weight), len(weight), bits, group_size, importance, factor)


def _factor(moments: Tensor) -> tuple[Tensor, Tensor]:
    """How an input's rounding error moves on to later inputs, and what it costs in the end.

    The damped moments are U U^T with an upper U, which is a Cholesky factor from the last input to
    the first. A column of U over its diagonal has the shares of earlier inputs' errors that this
    one makes up for; the square of the diagonal is the algorithm's 1 / [H^-1]_qq.

    Damping also gives a moment to an input that is zero throughout the text. If all inputs are
    zero, or a moment is not finite, inputs count as independent.

    Returns:
        (inputs, inputs) upper triangular with ones in the diagonal, and (inputs,).
    """
    mean = float(moments.diagonal().mean())
    for share in _DAMPINGS if 0.0 < mean < float("inf") else ():
        damped = moments.flip(0, 1)
        damped.diagonal().add_(share * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed and lower.isfinite().all():
            upper = lower.flip(0, 1).contiguous()  # LAPACK leaves it column by column
            diagonal = upper.diagonal().clone()
            return upper.div_(diagonal), diagonal.square_()
    return torch.eye(len(moments)), torch.ones(len(moments))
