"""Products and softmax of activations on a CPU, for layers with attention code of their own.

Every sum is one chain over its terms in rising order, as in cpu_attention. A term that is zero,
such as that of a slot that a row does not see, changes nothing wherever it stands. So a row's bits
depend neither on other rows, nor on threads, nor on the slots of other branches of a tree.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specexec_kernels import cpu_jit
from specexec_kernels.cpu_grouped import Placed, products
from specexec_kernels.formats.plain import chained_weight

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes(*tensors: Tensor) -> bool:
    """Whether `product` and `softmax` compute with these tensors."""
    return all(
        each.device.type == "cpu" and each.dtype in _DTYPES and each.dtype == tensors[0].dtype
        for each in tensors
    )


def product(left: Tensor, right: Tensor) -> Tensor:
    """Computes left @ right with float32 sums.

    Args:
        left: (..., rows, terms); `takes` must accept it together with `right`.
        right: (..., terms, columns), finite; the leading dimensions are broadcast.
    Returns:
        (..., rows, columns) float32.
    """
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    (rows, terms), columns = left.shape[-2:], right.shape[-1]
    left = left.float()
    if not left.numel() or not right.numel():
        return left.new_zeros(*batch, rows, columns)
    left = left.expand(*batch, rows, terms).reshape(-1, terms)
    right = right.expand(*batch, terms, columns).reshape(-1, terms, columns).contiguous()
    # padded with zeros to whole units of terms and at least one vector of columns, which is the
    # least that the kernels read
    unit = chained_weight(right[0]).format.unit
    missing = -terms % unit, max(cpu_jit.lanes() - columns, 0)
    if any(missing):
        left = functional.pad(left, (0, missing[0]))
        right = functional.pad(right, (0, missing[1], 0, missing[0]))
    takes = [range(first, first + rows) for first in range(0, len(left), rows)]
    found = products(left, takes, [[Placed(chained_weight(each))] for each in right])
    return found[..., :columns].contiguous().view(*batch, rows, columns)


def softmax(scores: Tensor) -> Tensor:
    """The softmax over the last dimension, with exponentials and sums in float32."""
    wide = scores.float()
    # torch.exp, unlike PyTorch's activations, gives an element the same bits wherever it stands
    powers = torch.exp(wide - wide.amax(dim=-1, keepdim=True))
    terms = powers.shape[-1]
    ones = powers.new_ones(terms, 1)
    totals = product(powers.reshape(1, -1, terms), ones)
    return (powers / totals.view(*powers.shape[:-1], 1)).to(scores.dtype)
