"""Products that a library is asked for with the same number of rows, whatever a pass has.

cuBLAS chooses a kernel by the shapes that it is given, and with it the order in which a row's
products are summed: a row of a pass by itself and the same row among 64 others then differ in their
last bits. Asked for one shape alone it takes one kernel.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def in_row_blocks(x: Tensor, block_rows: int, product: Callable[[Tensor], Tensor]) -> Tensor:
    """product(x), `block_rows` rows at a time; zeros stand behind the last.

    Args:
        x: (rows, inputs).
        product: (block_rows, inputs) contiguous -> (block_rows, outputs), each row by itself; no
            rows -> no rows.
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
    """The rows, and zeros behind them."""
    missing = block_rows - x.shape[0]
    return functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
