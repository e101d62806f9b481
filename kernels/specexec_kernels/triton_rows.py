# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels for packed weights of any format: unpacking, and the fused product of few rows.

The references are PackedWeight.unpack and x @ unpack().T. Each format names the function of
triton_formats that reads its weights (PackedFormat.triton); everything else is shared.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.triton_few_rows import launch_few_rows


@triton.jit
def _unpack_kernel(
    parts, out, K, N, READ: tl.constexpr, SETTINGS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    k = (tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None].to(tl.int64)
    inside = (k < K) & (n < N)
    weight = READ(parts, n, k, inside, K, N, SETTINGS)
    tl.store(out + n * K + k, weight.to(out.dtype.element_ty), mask=inside)


def unpack(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight of PackedWeight.unpack, rounded to `dtype`: (outputs, inputs)."""
    inputs, outputs = weight.in_features, weight.out_features
    parts, constants = _arguments(weight)
    out = torch.empty(outputs, inputs, dtype=dtype, device=parts[0].device)
    # a block is longest along the dimension in which neighbours in memory lie
    block_k, block_n = (32, 128) if weight.format.goes_down else (128, 16)
    grid = (triton.cdiv(inputs, block_k), triton.cdiv(outputs, block_n))
    # without fused multiply-add, weights are rounded as `unpack` rounds them
    _unpack_kernel[grid](
        parts, out, inputs, outputs, **constants, BLOCK_K=block_k, BLOCK_N=block_n,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    parts, x, out, M, K, N, READ: tl.constexpr, SETTINGS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    sums = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        outputs = n[:, None].to(tl.int64)
        inside = (k < K) & (outputs < N)
        # what lies outside may be read as anything, NaN included
        weight = tl.where(inside, READ(parts, outputs, k, inside, K, N, SETTINGS), 0.0)
        rows = tl.load(x + m * K + k, mask=(m < M) & (k < K), other=0.0)
        sums = tl.dot(rows, tl.trans(weight.to(rows.dtype)), acc=sums, input_precision="ieee")
    place = out + m * N + n[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=(m < M) & (n[None, :] < N))


def quantized_matmul(
    x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Computes x @ W.T with W in x's dtype and float32 sums; for few rows.

    Args:
        x: (rows, inputs).
        weight: W, (outputs, inputs).
        out_dtype: dtype of the result; x's where not given.
    """
    parts, constants = _arguments(weight)
    outputs = weight.out_features
    return launch_few_rows(_few_rows_kernel, (parts,), x, outputs, out_dtype, constants)


def _arguments(weight: PackedWeight) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The tensors that a format's function reads, its table included; and kernel constants."""
    found = weight.format.triton()
    assert found is not None, f"{weight.format.name} has no Triton form"
    matrices = weight.matrices()
    parts = [matrices[part.leaf].contiguous() for part in weight.format.parts]
    # GPUs before Ada have no E4M3, so float8 are given as bytes and decoded with integers
    parts = [part.view(torch.uint8) if part.is_floating_point() and part.element_size() == 1
             else part for part in parts]  # fmt: skip
    if found.table:
        parts.append(_table(found.table, parts[0].device))
    return tuple(parts), {"READ": found.read, "SETTINGS": found.settings}


@cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
