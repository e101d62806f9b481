"""Calls a library's matmul with one fixed number of rows, however many a pass has.

cuBLAS chooses a kernel, and with it the order of sums, by the shapes that it is given: a row in a
pass by itself and the same row among 64 others then differ in their last bits. Called with a single
shape, it always takes the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def in_row_blocks(x: Tensor, block_rows: int, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Computes product(x), `block_rows` rows at a time; the last block is padded with zeros.

    Args:
        x: (rows, inputs).
        block_rows: rows of every call of `product`, but for an x without rows.
        product: maps contiguous (block_rows, inputs) to (block_rows, outputs), each row by itself,
            and no rows to no rows.
    Returns:
        (rows, outputs)
    """
    rows = x.shape[0]
    if not rows:
        return product(x)
    if rows <= block_rows:
        return product(_block(x, block_rows))[:rows]
    first = product(x[:block_rows].contiguous())
    out = first.new_empty(rows, first.shape[1])
    out[:block_rows] = first
    del first
    for start in range(block_rows, rows, block_rows):
        own = x[start : start + block_rows]
        out[start : start + block_rows] = product(_block(own, block_rows))[: own.shape[0]]
    return out


def _block(x: Tensor, block_rows: int) -> Tensor:
    """Rows padded with zeros to `block_rows`."""
    missing = block_rows - x.shape[0]
    return functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
