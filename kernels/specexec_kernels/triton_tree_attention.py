# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Tree attention in Triton; reference and formula: specexec_kernels.tree_attention."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _accumulate(scores, values, top, total, output):
    """One step of the online softmax; scores are -inf where a row does not attend."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet
    weights = tl.exp(scores - base[:, None])
    shrink = tl.exp(top - base)
    total = total * shrink + tl.sum(weights, axis=1)
    output = tl.dot(
        weights.to(values.dtype), values, acc=output * shrink[:, None], input_precision="ieee"
    )
    return new_top, total, output


# sizes that differ from pass to pass must not be compiled into it
@triton.jit(do_not_specialize=["rows", "prefix_len", "tree_slots", "words"])
def _tree_attention_kernel(
    queries, keys, values, ancestors, out, rows, prefix_len, tree_slots, words, scale,
    key_head_stride, value_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    # a program's rows are (row, query head) pairs that share one key/value head
    pair = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    heads = tl.num_programs(1) * GROUP
    d = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (d < HEAD_DIM)[None, :]
    place = (row * heads + head)[:, None] * HEAD_DIM + d[None, :]
    query = tl.load(queries + place, mask=inside, other=0.0)
    keys += kv_head.to(tl.int64) * key_head_stride
    values += kv_head.to(tl.int64) * value_head_stride
    top = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    output = tl.zeros((BLOCK_ROWS, BLOCK_D), dtype=tl.float32)

    for start in range(0, prefix_len, BLOCK_SLOTS):
        slot = start + tl.arange(0, BLOCK_SLOTS)
        seen = slot < prefix_len
        at = slot[:, None] * HEAD_DIM + d[None, :]
        here = seen[:, None] & (d < HEAD_DIM)[None, :]
        key = tl.load(keys + at, mask=here, other=0.0)
        value = tl.load(values + at, mask=here, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top, total, output = _accumulate(scores, value, top, total, output)

    for start in range(0, tree_slots, 32):  # one word of ancestors per row and step
        slot = start + tl.arange(0, 32)
        at = (prefix_len + slot)[:, None] * HEAD_DIM + d[None, :]
        here = (slot < tree_slots)[:, None] & (d < HEAD_DIM)[None, :]
        key = tl.load(keys + at, mask=here, other=0.0)
        value = tl.load(values + at, mask=here, other=0.0)
        word = tl.load(ancestors + row * words + start // 32, mask=row < rows, other=0)
        seen = ((word[:, None] >> tl.arange(0, 32)[None, :]) & 1) != 0
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen & (slot < tree_slots)[None, :], scores, float("-inf"))
        top, total, output = _accumulate(scores, value, top, total, output)

    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place, output.to(out.dtype.element_ty), mask=inside)


def tree_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Tensor,
    prefix_len: int,
    scale: float | None = None,
) -> Tensor:
    """As tree_attention_ref; keys and values may be views of a larger cache, rows contiguous."""
    rows, heads, head_dim = queries.shape
    kv_heads, slots = keys.shape[:2]
    for cache in (keys, values):
        if cache.stride(1) != head_dim or cache.stride(2) != 1:
            raise ValueError(f"cache rows must be contiguous, not of strides {cache.stride()}")
    queries, ancestors = queries.contiguous(), ancestors.contiguous()
    out = torch.empty_like(queries)
    group = heads // kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_rows, block_slots = _blocks(rows * group, block_d, queries.element_size())
    grid = (triton.cdiv(rows * group, block_rows), kv_heads)
    _tree_attention_kernel[grid](
        queries, keys, values, ancestors, out, rows, prefix_len, slots - prefix_len,
        ancestors.shape[1], scale or 1 / math.sqrt(head_dim), keys.stride(0), values.stride(0),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_ROWS=block_rows,
        BLOCK_SLOTS=block_slots, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _blocks(pairs: int, block_d: int, item_bytes: int) -> tuple[int, int]:
    """Rows and prefix slots of a program's tiles.

    The largest powers of two whose tiles spill no registers and fit into the 99 KiB of shared
    memory that GeForce cards give a block; scripts/compile_kernels.py shows both.
    """
    if pairs <= 16 or item_bytes == 4 or block_d > 256:
        return 16, 64 if item_bytes == 2 and block_d <= 128 else 32
    return 64 if block_d <= 128 else 32, 64 if block_d <= 64 else 32
