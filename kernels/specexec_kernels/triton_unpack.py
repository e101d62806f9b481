# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Unpacking inside Triton kernels, shared by dequantize and the fused product.

Importing this module imports Triton; the reference implementations live elsewhere.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specexec_kernels.packing import PackedWeight


@triton.jit
def _field(low, high, bit, BITS: tl.constexpr):
    """The code that starts `bit` bits into `low` (uint32) and may straddle into `high`."""
    value = low >> bit
    if BITS == 3:
        # (high << 1) << (31 - bit) is high << (32 - bit) without the undefined shift by 32
        value = value | ((high << 1) << (31 - bit))
    return (value & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def _awq_bit(column):
    """First bit of a column's nibble: columns 0 2 4 6 1 3 5 7 of a word, lowest nibble first."""
    place = column % 8
    return ((place // 2 + (place % 2) * 4) * 4).to(tl.uint32)


@triton.jit
def load_weight(
    qweight, qzeros, scales, groups, k, n, K, N,
    GROUP: tl.constexpr, BITS: tl.constexpr, AWQ: tl.constexpr, MINUS_ONE: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
):  # fmt: skip
    """float32 weights of inputs `k` (a column of indices) and outputs `n` (a row); 0 outside."""
    inside = (k < K) & (n < N)
    group = tl.load(groups + k, mask=k < K, other=0) if HAS_GROUPS else k // GROUP
    row_words = N * BITS // 32  # words per row of qzeros
    if AWQ:
        bit = _awq_bit(n)
        word = tl.load(qweight + k * row_words + n // 8, mask=inside, other=0)
        code = _field(word.to(tl.uint32, bitcast=True), 0, bit, BITS)
        packed = tl.load(qzeros + group * row_words + n // 8, mask=inside, other=0)
        zero = _field(packed.to(tl.uint32, bitcast=True), 0, bit, BITS)
    else:
        at = k * BITS
        low = tl.load(qweight + (at // 32) * N + n, mask=inside, other=0)
        high = low
        if BITS == 3:
            last = K * BITS // 32 - 1
            high = tl.load(qweight + tl.minimum(at // 32 + 1, last) * N + n, mask=inside, other=0)
        code = _field(
            low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True),
            (at % 32).to(tl.uint32), BITS,
        )  # fmt: skip
        zero_at = n * BITS
        low = tl.load(qzeros + group * row_words + zero_at // 32, mask=inside, other=0)
        high = low
        if BITS == 3:
            after = tl.minimum(zero_at // 32 + 1, row_words - 1)
            high = tl.load(qzeros + group * row_words + after, mask=inside, other=0)
        low = low.to(tl.uint32, bitcast=True)
        if MINUS_ONE and BITS != 3:  # whole words, carry included
            ones: tl.constexpr = 0xFFFFFFFF // ((1 << BITS) - 1)
            low = low + ones
        zero = _field(low, high.to(tl.uint32, bitcast=True), (zero_at % 32).to(tl.uint32), BITS)
        if MINUS_ONE and BITS == 3:
            zero = (zero + 1) & 7
    scale = tl.load(scales + group * N + n, mask=inside, other=0).to(tl.float32)
    return scale * (code - zero).to(tl.float32)


def weight_arguments(weight: PackedWeight) -> tuple[tuple[Tensor, ...], dict[str, int]]:
    """Tensors and constants of a kernel that calls `load_weight`."""
    tensors = (
        weight.qweight,
        weight.qzeros,
        weight.scales,
        weight.qweight if weight.g_idx is None else weight.g_idx,
    )
    constants = {
        "GROUP": weight.group_size,
        "BITS": weight.format.bits,
        "AWQ": weight.format.awq,
        "MINUS_ONE": weight.format.stored_minus_one,
        "HAS_GROUPS": weight.g_idx is not None,
    }
    return tensors, constants
