# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Tree attention in Triton; tree_attention has the reference.

Slots are taken in blocks of one size that begin at its multiples, wherever the prefix ends and
however many rows there are. A block in which a row sees nothing leaves the row's sums as they are,
so a committed row has the same bits in a pass by itself and among others. A node of a tree does not
have its later bits: its ancestors lie in other slots than they will once they are committed.

Source: online softmax of FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

import math

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


@triton.jit
def _scores(query, key, scale, softcap, CAPPED: tl.constexpr):
    """Scores of a block; those of a capped kernel have been divided by the cap in `scale`."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if CAPPED:  # tanh, whose exponential may be infinite
        scores = (1 - 2 / (tl.exp(2 * scores) + 1)) * softcap
    return scores


# sizes that differ from pass to pass must not be compiled into it
@triton.jit(do_not_specialize=["rows", "prefix_len", "tree_slots", "words"])
def _tree_attention_kernel(
    queries, keys, values, ancestors, sinks, first_seen, out,
    rows, prefix_len, tree_slots, words, scale, softcap, key_head_stride, value_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    # a program's rows are (row, query head) pairs that share one key/value head
    pair = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    heads = tl.num_programs(1) * GROUP
    d, v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    real, in_key, in_value = row < rows, (d < HEAD_DIM)[None, :], (v < VALUE_DIM)[None, :]
    place = row * heads + head
    query = tl.load(queries + place[:, None] * HEAD_DIM + d[None, :],
                    mask=real[:, None] & in_key, other=0.0)  # fmt: skip
    keys += kv_head.to(tl.int64) * key_head_stride
    values += kv_head.to(tl.int64) * value_head_stride
    top = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    if sinks is not None:  # as a slot without a value, seen before all others
        top = tl.load(sinks + head, mask=real, other=0.0)
        total = tl.full((BLOCK_ROWS,), 1.0, dtype=tl.float32)
    output = tl.zeros((BLOCK_ROWS, BLOCK_V), dtype=tl.float32)
    begin = 0
    if first_seen is not None:  # slots that none of the rows sees are not read
        first = tl.load(first_seen + row, mask=real, other=prefix_len)
        begin = tl.min(first) // BLOCK_SLOTS * BLOCK_SLOTS

    whole = prefix_len // BLOCK_SLOTS * BLOCK_SLOTS
    for start in range(begin, whole, BLOCK_SLOTS):
        slot = start + tl.arange(0, BLOCK_SLOTS)
        key = tl.load(keys + slot[:, None] * HEAD_DIM + d[None, :], mask=in_key, other=0.0)
        value = tl.load(values + slot[:, None] * VALUE_DIM + v[None, :], mask=in_value, other=0.0)
        # All of them are seen, which the compiler does not know. Without a choice it would multiply
        # by the scale and subtract the maximum in one rounding here, and in two below.
        seen = (slot < prefix_len)[None, :]
        if first_seen is not None:
            seen = seen & (slot[None, :] >= first[:, None])
        scores = tl.where(seen, _scores(query, key, scale, softcap, CAPPED), float("-inf"))
        top, total, output = _accumulate(scores, value, top, total, output)

    for start in range(whole, prefix_len + tree_slots, BLOCK_SLOTS):
        slot = start + tl.arange(0, BLOCK_SLOTS)
        here = (slot < prefix_len + tree_slots)[:, None]
        key = tl.load(keys + slot[:, None] * HEAD_DIM + d[None, :],
                      mask=here & in_key, other=0.0)  # fmt: skip
        value = tl.load(values + slot[:, None] * VALUE_DIM + v[None, :],
                        mask=here & in_value, other=0.0)  # fmt: skip
        node = slot - prefix_len
        in_tree = (node >= 0) & (node < tree_slots)
        word = tl.load(ancestors + row[:, None] * words + node[None, :] // 32,
                       mask=real[:, None] & in_tree[None, :], other=0)  # fmt: skip
        seen = ((word >> (node[None, :] % 32)) & 1) != 0
        in_prefix = (slot < prefix_len)[None, :]
        if first_seen is not None:
            in_prefix = in_prefix & (slot[None, :] >= first[:, None])
        seen = in_prefix | (in_tree[None, :] & seen)
        scores = tl.where(seen, _scores(query, key, scale, softcap, CAPPED), float("-inf"))
        top, total, output = _accumulate(scores, value, top, total, output)

    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place[:, None] * VALUE_DIM + v[None, :], output.to(out.dtype.element_ty),
             mask=real[:, None] & in_value)  # fmt: skip


def tree_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Tensor,
    prefix_len: int,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    first_seen: Tensor | None = None,
) -> Tensor:
    """tree_attention_ref in Triton; keys and values may be views of a larger cache.

    They are copied first where the slots of a head are not contiguous, as with values that were
    expanded from a latent together with their keys.
    """
    rows, heads, head_dim = queries.shape
    (kv_heads, slots), value_dim = keys.shape[:2], values.shape[2]
    keys, values = (
        cache if cache.stride()[1:] == (cache.shape[2], 1) else cache.contiguous()
        for cache in (keys, values)
    )
    queries, ancestors = queries.contiguous(), ancestors.contiguous()
    out = queries.new_empty(rows, heads, value_dim)
    group = heads // kv_heads
    block_d, block_v = (max(16, triton.next_power_of_2(size)) for size in (head_dim, value_dim))
    block_rows, block_slots, stages = _blocks(max(block_d, block_v), queries.element_size())
    grid = (triton.cdiv(rows * group, block_rows), kv_heads)
    scale = scale or 1 / math.sqrt(head_dim)
    _tree_attention_kernel[grid](
        queries, keys, values, ancestors, None if sinks is None else sinks.float(), first_seen, out,
        rows, prefix_len, slots - prefix_len, ancestors.shape[1],
        scale if softcap is None else scale / softcap, softcap or 1.0,
        keys.stride(0), values.stride(0),
        GROUP=group, HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_D=block_d, BLOCK_V=block_v,
        BLOCK_ROWS=block_rows, BLOCK_SLOTS=block_slots,
        CAPPED=softcap is not None, num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _blocks(block_d: int, item_bytes: int) -> tuple[int, int, int]:
    """Rows of a program, slots of a block, and pipeline stages.

    They are powers of two for which no registers spill and the tiles fit into the 99 KiB of shared
    memory that GeForce cards give a block; scripts/compile_kernels.py shows both. They depend on
    heads and dtype alone, not on the number of rows: a tile of another shape would distribute a sum
    over threads in another way, and sums must be the same in passes of few rows and of many.
    """
    if block_d > 256:  # Gemma-4's layers with full attention have heads of 512
        return (16, 32, 2) if item_bytes == 2 else (16, 16, 1)
    if item_bytes == 4:
        return 16, 32, 2
    return 64 if block_d <= 128 else 32, 32, 2
