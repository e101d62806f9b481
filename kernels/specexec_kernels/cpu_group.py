"""Products of rows with many weights of one kind in one launch, on a CPU.

A mixture's layer multiplies a few rows with the matrices of many experts. The bits are those that
cpu_linear and dispatch.quantized_matmul give for each alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specexec_kernels import cpu_dot, cpu_half, cpu_jit, cpu_linear, cpu_quant
from specexec_kernels.cpu_half import Transposed
from specexec_kernels.cpu_products import Form
from specexec_kernels.formats.base import RowWeight
from specexec_kernels.packing import PackedWeight

Weight = Tensor | Transposed | PackedWeight | RowWeight


def form_for(rows: Tensor, weights: Sequence[Sequence[Weight]]) -> Form | None:
    """The kernels that multiply all of these weights, None where they are to be multiplied alone.

    Args:
        rows: of the dtype and on the device of those that will be multiplied.
        weights: groups whose weights at one place are alike, as cpu_products.products wants them.
    """
    if rows.device.type != "cpu":
        return None
    form = _form(rows.dtype, weights[0][0])
    for place, alike in enumerate(weights[0]):
        kind = _kind(alike)
        if _form(rows.dtype, alike) is not form:
            return None
        if any(_kind(group[place]) != kind for group in weights):
            return None
    return form


def _kind(weight: Weight) -> object:
    """Equal for weights that differ by nothing but their values."""
    if isinstance(weight, RowWeight):
        return RowWeight
    if isinstance(weight, Tensor):
        return weight.dtype, weight.shape
    if isinstance(weight, Transposed):
        return Transposed, weight.stored.dtype, weight.shape
    return (
        weight.format, weight.in_features, weight.out_features, weight.group_size,
        weight.g_idx is None, weight.scales.dtype,
    )  # fmt: skip


def _form(rows: torch.dtype, weight: Weight) -> Form | None:
    pairs = rows == torch.bfloat16
    if isinstance(weight, RowWeight):
        return None
    if isinstance(weight, PackedWeight):
        if not cpu_quant.supports(weight):
            return None
        return cpu_dot.PACKED if pairs and cpu_dot.supports(weight) else cpu_quant.FUSED
    if isinstance(weight, Transposed):
        fits = cpu_linear.takes(rows, weight.stored) and cpu_linear.fits_transposed(weight.stored)
        return cpu_half.HALF if fits else None
    strip = 2 * cpu_jit.lanes()
    if not cpu_linear.takes(rows, weight) or any(size % strip for size in weight.shape):
        return None
    return cpu_dot.STORED if pairs and cpu_dot.supports(weight) else cpu_half.HALF
