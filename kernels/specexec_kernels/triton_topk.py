# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Fused log-softmax and top-k in Triton; reference: specexec_kernels.log_softmax_topk.

Each program reads one chunk of a row once and leaves its k best, its maximum and its sum of
exponentials. Merging those few candidates is left to PyTorch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # stands for logits of -inf, which may be chosen too


@triton.jit
def _chunk_kernel(
    logits, best, columns, tops, sums, vocab, chunks, row_stride,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    for i in range(K):
        found = tl.argmax(value, axis=0, tie_break_left=True)
        tl.store(best + out * K + i, tl.max(value, axis=0))
        tl.store(columns + out * K + i, chunk * BLOCK + found)
        value = tl.where(tl.arange(0, BLOCK) == found, float("-inf"), value)


def log_softmax_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As log_softmax_topk_ref; k is small (the kernel picks its candidates one by one)."""
    rows, vocab = logits.shape
    if not 1 <= k <= vocab:
        raise ValueError(f"k must be between 1 and {vocab}, not {k}")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    block = max(1024, triton.next_power_of_2(k))
    chunks = triton.cdiv(vocab, block)
    shape = (rows, chunks, k)
    best = torch.empty(shape, dtype=torch.float32, device=logits.device)
    columns = torch.empty(shape, dtype=torch.int32, device=logits.device)
    tops, sums = torch.empty_like(best[..., 0]), torch.empty_like(best[..., 0])
    _chunk_kernel[(rows, chunks)](
        logits, best, columns, tops, sums, vocab, chunks, logits.stride(0),
        K=k, BLOCK=block, enable_fp_fusion=True,
    )  # fmt: skip
    total = torch.logsumexp(tops + sums.log(), dim=1, keepdim=True)
    # candidates lie in rising columns, so a stable sort keeps the lower of equal ones first
    order = torch.sort(best.flatten(1), dim=1, descending=True, stable=True)
    chosen = columns.flatten(1).gather(1, order.indices[:, :k]).long()
    values = order.values[:, :k]
    return torch.where(values > -3.0e38, values - total, -torch.inf), chosen
