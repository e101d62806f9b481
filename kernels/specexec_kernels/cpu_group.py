"""Products of rows with many weights of one kind in one launch, on a CPU.

A mixture's layer multiplies a few rows with the matrices of many experts. The bits are those that
cpu_linear and dispatch.quantized_matmul give for each alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from specexec_kernels import cpu_dot, cpu_half, cpu_jit, cpu_linear, cpu_rows
from specexec_kernels.cpu_half import Transposed
from specexec_kernels.cpu_products import Form, Placed
from specexec_kernels.formats.base import PackedWeight

Weight = Tensor | Transposed | PackedWeight


class Group:
    """The weights of one group, such as an expert's, looked at once."""

    __slots__ = ("_forms", "kinds", "weights")

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = [Placed(weight) for weight in weights]
        self.kinds = tuple(map(_kind, weights))  # equal where weights differ by values alone
        self._forms: dict[torch.dtype, Form | None] = {}

    def is_like(self, other: Group) -> bool:
        """Whether the weights of both, one after another, differ by nothing but their values."""
        return self.kinds == other.kinds

    def form(self, rows: torch.dtype) -> Form | None:
        """The kernels that multiply all of them with rows of a dtype, None where there are none."""
        if rows not in self._forms:
            forms = {_form(rows, placed.weight) for placed in self.weights}
            self._forms[rows] = forms.pop() if len(forms) == 1 else None
        return self._forms[rows]


def form_for(rows: Tensor, groups: Sequence[Group]) -> Form | None:
    """The kernels that multiply all of these weights, None where they are to be multiplied alone.

    Args:
        rows: of the dtype and on the device of those that will be multiplied.
        groups: whose weights at one place are alike, as cpu_products.products wants them.
    """
    first = groups[0]
    if rows.device.type != "cpu" or not all(first.is_like(group) for group in groups[1:]):
        return None
    return first.form(rows.dtype)


def _kind(weight: Weight) -> Hashable:
    """Equal for weights that differ by nothing but their values."""
    if isinstance(weight, PackedWeight):
        return weight.format, weight.in_features, weight.out_features
    stored = weight.stored if isinstance(weight, Transposed) else weight
    return cpu_half.HALF.kind(weight), stored.is_contiguous()


def _form(rows: torch.dtype, weight: Weight) -> Form | None:
    pairs = rows == torch.bfloat16
    if isinstance(weight, PackedWeight):
        return cpu_rows.form_for(rows) if cpu_rows.supports(weight) else None
    stored = weight.stored if isinstance(weight, Transposed) else weight
    if rows not in (torch.float32, stored.dtype):
        return None  # such a weight is rounded before it is multiplied
    if isinstance(weight, Transposed):
        fits = cpu_linear.takes(rows, weight.stored) and cpu_linear.fits_transposed(weight.stored)
        return cpu_half.HALF if fits else None
    strip = 2 * cpu_jit.lanes()
    if not cpu_linear.takes(rows, weight) or any(size % strip for size in weight.shape):
        return None
    return cpu_dot.STORED if pairs and cpu_dot.supports(weight) else cpu_half.HALF
