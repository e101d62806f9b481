"""Products and softmax of activations on a CPU for layers that attend by code of their own.

Every sum is one chain over its terms in rising order, as in cpu_attention: a term that is zero, as
of a slot that a row does not see, changes nothing wherever it stands. So a row's bits depend on
neither the other rows, nor the threads, nor the slots of other branches of a tree.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specexec_kernels import cpu_jit
from specexec_kernels.cpu_half import CHAINED, Transposed
from specexec_kernels.cpu_half_ir import UNROLL
from specexec_kernels.cpu_products import batched_product

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes(*tensors: Tensor) -> bool:
    """Whether `product`, or `softmax`, computes with them."""
    return all(
        each.device.type == "cpu" and each.dtype in _DTYPES and each.dtype == tensors[0].dtype
        for each in tensors
    )


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right with sums in float32.

    Args:
        left: (..., rows, terms) that `takes` accepts with `right`.
        right: (..., terms, columns), finite; the leading dimensions are broadcast.
    Returns:
        (..., rows, columns) float32.
    """
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    (rows, terms), columns = left.shape[-2:], right.shape[-1]
    left = left.float()
    if not left.numel() or not right.numel():
        return left.new_zeros(*batch, rows, columns)
    left = left.expand(*batch, rows, terms).reshape(-1, rows, terms)
    right = right.expand(*batch, terms, columns).reshape(-1, terms, columns).contiguous()
    rest_of_terms, rest_of_columns = -terms % UNROLL, -columns % (2 * cpu_jit.lanes())
    if rest_of_terms or rest_of_columns:
        left = functional.pad(left, (0, rest_of_terms))
        right = functional.pad(right, (0, rest_of_columns, 0, rest_of_terms))
    found = batched_product(CHAINED, left, [Transposed(each) for each in right])
    return found[..., :columns].contiguous().view(*batch, rows, columns)


def softmax(scores: Tensor) -> Tensor:
    """The softmax over the last dimension, with exponentials and sums in float32."""
    wide = scores.float()
    # PyTorch's exponential of an element does not depend on where it stands
    powers = torch.exp(wide - wide.amax(dim=-1, keepdim=True))
    terms = powers.shape[-1]
    ones = powers.new_ones(terms, 1)
    totals = product(powers.reshape(1, -1, terms), ones)
    return (powers / totals.view(*powers.shape[:-1], 1)).to(scores.dtype)
