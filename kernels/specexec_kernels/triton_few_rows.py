"""How kernels that multiply few rows with a packed weight are launched, whatever packs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

# Rows and outputs of a program, which it carries through all inputs, so many at a time: each packed
# byte is read once for all its rows, and the order of the sums does not depend on the launch.
_ROWS, _BLOCK_K, _BLOCK_N = 16, 64, 32


def launch_few_rows(
    kernel: Any,
    weight: Sequence[Any],
    x: Tensor,
    outputs: int,
    out_dtype: torch.dtype | None,
    constants: Mapping[str, Any],
) -> Tensor:
    """x (rows, inputs) times a packed weight in x's dtype, sums in float32.

    Args:
        kernel: (*weight, x, out, M, K, N) with the constants, ROWS, BLOCK_K and BLOCK_N.
        weight: its first arguments.
        outputs: of the weight.
        out_dtype: of the result, x's unless told.
    Returns:
        (rows, outputs)
    """
    x = x.contiguous()
    rows, inputs = x.shape
    out = torch.empty(rows, outputs, dtype=out_dtype or x.dtype, device=x.device)
    grid = (triton.cdiv(outputs, _BLOCK_N), triton.cdiv(rows, _ROWS))
    kernel[grid](
        *weight, x, out, rows, inputs, outputs, **constants,
        ROWS=_ROWS, BLOCK_K=_BLOCK_K, BLOCK_N=_BLOCK_N, enable_fp_fusion=False,
    )  # fmt: skip
    return out
