# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Fused log-softmax and top-k in Triton; log_softmax_topk has the reference.

Each program reads one chunk of a row once, and writes its k largest values, its maximum and its sum
of exponentials. For a small k the values are picked one by one, for a large one the chunk is
sorted. PyTorch merges the chunks' candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # replaces logits of -inf, which may be chosen too
_CHUNK = 1024  # columns of a program
# Up to this k a chunk's largest values are picked one by one. Estimated, not measured: sorting a
# chunk takes 55 steps, and each pick is a reduction over the chunk.
_MOST_PICKED = 64


@triton.jit
def _sortable(value, place, BLOCK: tl.constexpr):
    """int64 that rise with the value, and among equal values fall with the place in the chunk."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative numbers fall
    return (rising.to(tl.int64) << 32) | (BLOCK - 1 - place).to(tl.int64)


@triton.jit
def _value_of(key):
    """The value that _sortable was given."""
    rising = (key >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _chunk_kernel(
    logits, best, columns, tops, sums, vocab, chunks, row_stride,
    K: tl.constexpr, BLOCK: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """K is at most BLOCK."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    value = tl.load(
        logits + row.to(tl.int64) * row_stride + column, mask=inside, other=float("-inf")
    ).to(tl.float32)
    value = tl.where(inside, tl.maximum(value, _LOWEST), float("-inf"))
    top = tl.max(value, axis=0)
    out = row * chunks + chunk
    tl.store(tops + out, top)
    tl.store(sums + out, tl.sum(tl.exp(value - top), axis=0))
    place = tl.arange(0, BLOCK)
    if SORTED:
        key = tl.sort(_sortable(value, place, BLOCK), descending=True)
        column = chunk * BLOCK + BLOCK - 1 - (key & 0xFFFFFFFF).to(tl.int32)
        tl.store(best + out * K + place, _value_of(key), mask=place < K)
        tl.store(columns + out * K + place, column, mask=place < K)
    else:
        for i in range(K):
            found = tl.argmax(value, axis=0, tie_break_left=True)
            tl.store(best + out * K + i, tl.max(value, axis=0))
            tl.store(columns + out * K + i, chunk * BLOCK + found)
            value = tl.where(place == found, float("-inf"), value)


def log_softmax_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """log_softmax_topk_ref in Triton.

    Raises:
        ValueError: k is out of range.
    """
    rows, vocab = logits.shape
    if not 1 <= k <= vocab:
        raise ValueError(f"k must be between 1 and {vocab}, not {k}")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    chunks, kept = triton.cdiv(vocab, _CHUNK), min(k, _CHUNK)
    shape = (rows, chunks, kept)
    best = torch.empty(shape, dtype=torch.float32, device=logits.device)
    columns = torch.empty(shape, dtype=torch.int32, device=logits.device)
    tops, sums = torch.empty_like(best[..., 0]), torch.empty_like(best[..., 0])
    _chunk_kernel[(rows, chunks)](
        logits, best, columns, tops, sums, vocab, chunks, logits.stride(0),
        K=kept, BLOCK=_CHUNK, SORTED=kept > _MOST_PICKED, enable_fp_fusion=True,
    )  # fmt: skip
    total = torch.logsumexp(tops + sums.log(), dim=1, keepdim=True)
    # candidates lie in rising columns, so a stable sort keeps the lower of equal ones first
    order = torch.sort(best.flatten(1), dim=1, descending=True, stable=True)
    chosen = columns.flatten(1).gather(1, order.indices[:, :k]).long()
    values = order.values[:, :k]
    return torch.where(values > -3.0e38, values - total, -torch.inf), chosen
