# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernel for the root-mean-square norm of rows, in one launch and in the dtype asked for.

PyTorch needs seven launches for what modelling code writes down, and sums a row in an order that
depends on the number of rows; here a row's width alone decides it. Source: Zhang and Sennrich,
"Root Mean Square Layer Normalization", equation 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexec_kernels.triton_launch import launch

_MOST_ELEMENTS = 4096  # of a row that a program has in registers
_FEWEST_ELEMENTS = 1024  # of a program: narrow rows, as heads are, share one


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x, weight, out, rows, stride, eps, WIDTH: tl.constexpr, CENTRED: tl.constexpr,
    ROUNDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    dtype = x.dtype.element_ty
    squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (at < WIDTH)
        value = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
        squares += value * value
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / WIDTH + eps)[:, None]
    for first in range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (at < WIDTH)
        value = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32) * scale
        factor = tl.load(weight + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        if CENTRED:
            factor += 1.0
        value = value.to(dtype).to(tl.float32) * factor if ROUNDED else (value * factor).to(dtype)
        tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    centred: bool,
    rounded: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Each row divided by the root of its mean square, and multiplied by a weight.

    Args:
        x: (..., width) rows.
        weight: (width,).
        eps: added to the mean square.
        centred: whether the weight is stored less one, as Gemma's.
        rounded: whether the divided row is rounded to x's dtype, as Llama's; else its product with
            the weight is.
    Returns:
        (..., width) in `out_dtype`.
    """
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=out_dtype, device=x.device)
    block = min(_MOST_ELEMENTS, triton.next_power_of_2(width))
    of_a_program = max(1, _FEWEST_ELEMENTS // block)
    launch(
        _norm_kernel, (triton.cdiv(rows.shape[0], of_a_program),), (rows, weight, out),
        (rows.shape[0],), (rows.stride(0), eps),
        {
            "WIDTH": width, "CENTRED": centred, "ROUNDED": rounded, "ROWS": of_a_program,
            "BLOCK": block,
        },
        warps=max(4, block // 512),
    )  # fmt: skip
    return out.view(x.shape)
