"""Launches Triton kernels that multiply few rows by a packed weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

# A program multiplies _ROWS rows by _BLOCK_N outputs, and goes through all inputs, _BLOCK_K at a
# time. So it reads each packed byte once for all its rows, and the order of sums does not depend on
# the size of the launch.
_ROWS, _BLOCK_K, _BLOCK_N = 16, 64, 32


def launch_few_rows(
    kernel: Any,
    weight: Sequence[Any],
    x: Tensor,
    outputs: int,
    out_dtype: torch.dtype | None,
    constants: Mapping[str, Any],
) -> Tensor:
    """Multiplies x by the transpose of a packed weight in x's dtype, with float32 sums.

    Args:
        kernel: takes (*weight, x, out, M, K, N), `constants`, ROWS, BLOCK_K and BLOCK_N.
        weight: the kernel's first arguments.
        x: (rows, inputs).
        outputs: outputs of the weight.
        out_dtype: dtype of the result; x's where not given.
        constants: further constants of the kernel.
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
