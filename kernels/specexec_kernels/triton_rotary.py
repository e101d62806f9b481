# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernel that turns queries and keys by their rows' angles, both in one launch.

PyTorch needs ten launches for what modelling code writes down. The operations and their roundings
are the same here, so the bits are. Source: Su et al., "RoFormer", section 3.4.2, in the form in
which element i turns with element i + half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexec_kernels.triton_launch import launch

_HEADS = 16  # of a program


@triton.jit
def _turn(
    x, out, cos, sin, head, head_stride, out_head_stride, heads, HALF: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    dtype = x.dtype.element_ty
    at = tl.arange(0, BLOCK)[None, :]
    angle = at < HALF
    real = angle & (head < heads)
    x += head * head_stride
    out += head * out_head_stride
    low = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    high = tl.load(x + HALF + at, mask=real, other=0.0).to(tl.float32)
    low_cos = tl.load(cos + at, mask=angle, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + HALF + at, mask=angle, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + at, mask=angle, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + HALF + at, mask=angle, other=0.0).to(tl.float32)
    first = (low * low_cos).to(dtype).to(tl.float32) - (high * low_sin).to(dtype).to(tl.float32)
    second = (high * high_cos).to(dtype).to(tl.float32) + (low * high_sin).to(dtype).to(tl.float32)
    tl.store(out + at, first.to(dtype), mask=real)
    tl.store(out + HALF + at, second.to(dtype), mask=real)
    if REST > 0:
        behind = tl.arange(0, REST_BLOCK)[None, :]
        real = (behind < REST) & (head < heads)
        behind += 2 * HALF
        tl.store(out + behind, tl.load(x + behind, mask=real, other=0.0), mask=real)


@triton.jit
def _rotary_kernel(
    q, k, cos, sin, q_out, k_out, q_head, q_row, k_head, k_row, q_out_head, q_out_row, k_out_head,
    k_out_row, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += row * 2 * HALF
    sin += row * 2 * HALF
    q_blocks = tl.cdiv(Q_HEADS, HEADS)
    head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    if block < q_blocks:
        _turn(
            q + row * q_row, q_out + row * q_out_row, cos, sin, head, q_head, q_out_head, Q_HEADS,
            HALF, BLOCK, REST, REST_BLOCK,
        )  # fmt: skip
    else:
        _turn(
            k + row * k_row, k_out + row * k_out_row, cos, sin, head - q_blocks * HEADS, k_head,
            k_out_head, K_HEADS, HALF, BLOCK, REST, REST_BLOCK,
        )  # fmt: skip


def takes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel turns these queries and keys."""
    rows, width = cos.shape[-2:]
    return (
        q.ndim == k.ndim == 4
        and q.shape[0] == k.shape[0] == 1
        and q.stride(-1) == k.stride(-1) == 1
        and cos.shape == sin.shape == (1, rows, width)
        and q.shape[2:] == k.shape[2:]
        and q.shape[2] == rows
        and width <= q.shape[3]
        and width % 2 == 0
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns queries and keys.

    Args:
        q, k: (1, heads, rows, head_dim), see `takes`.
        cos, sin: (1, rows, width) of each row's angles; what a head has beyond `width` stays.
    Returns:
        both turned, with the strides that PyTorch's operations would give them.
    """
    heads, rows, head_dim = q.shape[1:]
    half, rest = cos.shape[2] // 2, head_dim - cos.shape[2]
    outs = torch.empty_like(q), torch.empty_like(k)
    strides = [each.stride(dim) for each in (q, k, *outs) for dim in (1, 2)]
    blocks = triton.cdiv(heads, _HEADS) + triton.cdiv(k.shape[1], _HEADS)
    launch(
        _rotary_kernel, (rows, blocks), (q, k, cos, sin, *outs), (), strides,
        {
            "Q_HEADS": heads, "K_HEADS": k.shape[1], "HEADS": _HEADS, "HALF": half,
            "BLOCK": triton.next_power_of_2(half), "REST": rest,
            "REST_BLOCK": triton.next_power_of_2(rest),
        },
    )  # fmt: skip
    return outs
