"""Passes on a GPU whose products and norms give a row the same bits whatever the other rows are.

A target's texts must not depend on how many rows a pass has (docs/architecture.md). On a CPU our
own kernels see to that. On a GPU PyTorch multiplies, and is asked for products of BLOCK_ROWS rows
alone. Its sums over a row (the mean in a norm) are shared out among a block's threads by how many
rows there are, up to 16 of them, so norms are never given fewer than BLOCK_ROWS. A mixture's
experts are no part of it: where one lies decides which device computes it.
Source of the latter: setReduceConfig in aten/src/ATen/native/cuda/Reduce.cuh of pytorch/pytorch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from specexec_cli.models.decoder_layer import is_norm
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.planning.memory import BLOCK_ROWS


def keep_rows_apart(model: nn.Module) -> None:
    """Has every linear and every norm of a model treat its rows so."""
    for module in model.modules():
        if isinstance(module, MixedLinear | QuantizedLinear):
            module.block_rows = BLOCK_ROWS
        elif is_norm(module):
            module.forward = _of_many_rows(module.forward)


def _of_many_rows(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The norm of (1, rows, ...) or (rows, hidden), computed with at least BLOCK_ROWS rows.

    A norm that is gated by a second tensor has it in the same shape.
    """

    def forward(hidden: Tensor, *others: Tensor) -> Tensor:
        rows_dim = 1 if hidden.ndim > 2 else 0
        rows = hidden.shape[rows_dim]
        if rows >= BLOCK_ROWS:
            return norm(hidden, *others)
        # padding is told from the last dimension on
        behind = (0, 0) * (hidden.ndim - 1 - rows_dim) + (0, BLOCK_ROWS - rows)
        padded = (functional.pad(each, behind) for each in (hidden, *others))
        return norm(*padded).narrow(rows_dim, 0, rows)

    return forward
