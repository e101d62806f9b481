"""GPTQ: quantization with the errors that a text tells apart, for the format of packing.py.

Inputs of a linear go together: what rounding one column of a weight does to the outputs, others can
mend in part. Columns are rounded one after another, and each one's error is taken up by those that
are still to come, as far as they go together in the text. Source: Frantar et al.,
arXiv:2210.17323, algorithm 1, over the grids of fitted.py, which are fitted to each group as it is
by then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specexec_kernels.fitted import Codes, fit
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import pack_rows, store_zeros

# Of the mean second moment, added to each input's own (section 3.3); more where rounding leaves the
# moments without a Cholesky factor.
_DAMPINGS = (0.01, 0.1, 1.0)


def quantize_calibrated(weight: Tensor, moments: Tensor, fmt: Gptq) -> PackedWeight:
    """Packs a weight, by what a text gives its inputs.

    Args:
        weight: (outputs, inputs), any float dtype.
        moments: (inputs, inputs) float32, the sum of x x^T over the text's rows x.
        fmt: whose groups divide the inputs.
    """
    found = calibrated(weight, moments, fmt.bits, fmt.group)
    tensors = {
        "qweight": pack_rows(found.codes.T, fmt.bits),
        "qzeros": store_zeros(found.zeros.T, fmt.bits, minus_one=fmt.stored_minus_one),
        "scales": found.scales.T.contiguous(),
    }
    return PackedWeight(fmt, weight.shape[1], weight.shape[0], tensors)


def calibrated(weight: Tensor, moments: Tensor, bits: int, group_size: int) -> Codes:
    """Codes, zero points and scales of a weight (outputs, inputs); moments as above."""
    left = weight.float().clone()  # what the columns are to become, errors so far included
    factor = _factor(moments)
    codes, zeros, scales = torch.empty(left.shape, dtype=torch.int32), [], []
    for first in range(0, left.shape[1], group_size):
        end = first + group_size
        grid = fit(left[:, first:end], bits, group_size)
        zeros.append(grid.zeros)
        scales.append(grid.scales)
        zero, scale = grid.zeros[:, 0].float(), grid.scales[:, 0].float()
        errors = torch.empty(left.shape[0], group_size)
        for column in range(first, end):
            code = ((left[:, column] / scale).round() + zero).clamp(0, 2**bits - 1)
            error = (left[:, column] - scale * (code - zero)) / factor[column, column]
            left[:, column + 1 : end] -= error[:, None] * factor[column, column + 1 : end]
            codes[:, column], errors[:, column - first] = code.int(), error
        left[:, end:] -= errors @ factor[first:end, end:]
    return Codes(codes, torch.cat(zeros, 1), torch.cat(scales, 1))


def _factor(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped moments, (inputs, inputs).

    An input that the text never has gets a moment of its own all the same, by the damping. Where
    there is none at all, or values are not finite, inputs are taken to be independent.
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
