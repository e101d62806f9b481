# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels over packed weights: dequantize, and the fused product for few rows.

References: specexec_kernels.dequantize.dequantize_ref, and x @ dequantize_ref(weight).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexec_kernels.packing import PackedWeight
from specexec_kernels.triton_few_rows import launch_few_rows
from specexec_kernels.triton_unpack import load_weight, weight_arguments


@triton.jit
def _dequantize_kernel(
    qweight, qzeros, scales, groups, out, K, N,
    GROUP: tl.constexpr, BITS: tl.constexpr, AWQ: tl.constexpr, MINUS_ONE: tl.constexpr,
    HAS_GROUPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    k = (tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K))[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    weight = load_weight(
        qweight, qzeros, scales, groups, k, n, K, N, GROUP, BITS, AWQ, MINUS_ONE, HAS_GROUPS
    )
    place = out + k.to(tl.int64) * N + n
    tl.store(place, weight.to(out.dtype.element_ty), mask=(k < K) & (n < N))


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """(inputs, outputs) weight in `dtype`: W = scale[g] * (code - zero[g])."""
    inputs, outputs = weight.in_features, weight.out_features
    out = torch.empty(inputs, outputs, dtype=dtype, device=weight.qweight.device)
    tensors, constants = weight_arguments(weight)
    block_k, block_n = 32, 128
    grid = (triton.cdiv(inputs, block_k), triton.cdiv(outputs, block_n))
    _dequantize_kernel[grid](
        *tensors, out, inputs, outputs, **constants, BLOCK_K=block_k, BLOCK_N=block_n,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    qweight, qzeros, scales, groups, x, out, M, K, N,
    GROUP: tl.constexpr, BITS: tl.constexpr, AWQ: tl.constexpr, MINUS_ONE: tl.constexpr,
    HAS_GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    m = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    sums = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        weight = load_weight(
            qweight, qzeros, scales, groups, k[:, None], n, K, N,
            GROUP, BITS, AWQ, MINUS_ONE, HAS_GROUPS,
        )  # fmt: skip
        rows = tl.load(x + m * K + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
        sums = tl.dot(rows, weight.to(rows.dtype), acc=sums, input_precision="ieee")
    tl.store(out + m * N + n, sums.to(out.dtype.element_ty), mask=(m < M) & (n < N))


def quantized_matmul(
    x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x (rows, inputs) times the packed weight in x's dtype, sums in float32.

    Args:
        out_dtype: of the result, x's unless told.

    See launch_few_rows for the order of the sums.
    """
    tensors, constants = weight_arguments(weight)
    outputs = weight.out_features
    return launch_few_rows(_few_rows_kernel, tensors, x, outputs, out_dtype, constants, fused=True)
