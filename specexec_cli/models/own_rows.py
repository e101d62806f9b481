"""Makes a GPU's products and norms give each row the same bits, whatever the other rows are.

A target's texts must not depend on how many rows a pass has (docs/architecture.md). On a CPU our
own kernels ensure this. On a GPU PyTorch multiplies, and is only given products of BLOCK_ROWS rows.
PyTorch divides a sum over a row (the mean in a norm) among threads by the number of rows, up to 16
rows, so norms that no kernel of ours computes (fused.py) never get fewer than BLOCK_ROWS. A
mixture's experts are excluded where they come one by one: the place of an expert decides which
device computes it.
Source for sums: setReduceConfig in aten/src/ATen/native/cuda/Reduce.cuh of pytorch/pytorch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from specexec_cli.models.decoder_layer import is_norm
from specexec_cli.models.fused import is_fused
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.planning.memory import BLOCK_ROWS


def keep_rows_apart(model: nn.Module) -> None:
    """Makes every linear and every norm of a model give each row the same bits in any company."""
    for module in model.modules():
        if isinstance(module, MixedLinear | QuantizedLinear):
            module.block_rows = BLOCK_ROWS
        elif is_norm(module) and not is_fused(module):
            module.forward = _of_many_rows(module.forward)


def _of_many_rows(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps a norm of (1, rows, ...) or (rows, hidden) so that it gets at least BLOCK_ROWS rows.

    Further tensors, such as the gate of a gated norm, have the same shape.
    """

    def forward(hidden: Tensor, *others: Tensor) -> Tensor:
        rows_dim = 1 if hidden.ndim > 2 else 0
        rows = hidden.shape[rows_dim]
        if rows >= BLOCK_ROWS:
            return norm(hidden, *others)
        # functional.pad takes the last dimension's padding first
        behind = (0, 0) * (hidden.ndim - 1 - rows_dim) + (0, BLOCK_ROWS - rows)
        padded = (functional.pad(each, behind) for each in (hidden, *others))
        return norm(*padded).narrow(rows_dim, 0, rows)

    return forward
