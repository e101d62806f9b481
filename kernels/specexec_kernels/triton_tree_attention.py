# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Tree attention in Triton; tree_attention has the reference.

Positions are taken in blocks of one size that begin at its multiples, wherever the prefix ends and
however many rows there are. A block in which a row sees nothing leaves the row's sums as they are.
So a row has the same bits in a pass by itself and among others, as a node of a tree and once it is
committed. Rows share the blocks whose positions lie in slots of their own number; in a node's last
blocks its ancestors' rows are gathered from the slots where the tree has them. The first slots may
lie in blocks that texts share (split_rows), which a table finds by address.

Source: online softmax of FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from specexec_kernels.split_rows import BLOCK_SLOTS, SplitRows
from specexec_kernels.tree_attention import COLUMNS, TreeMask

_ALIGNED_BYTES = 16  # that a thread loads at once


@triton.jit
def _piece(start, rows, blocks, front, kv_head, DIM: tl.constexpr, SHARED_SLOTS: tl.constexpr,
           ALIGNED: tl.constexpr):  # fmt: skip
    """Where slot 0 of a head would be in the piece that the slots from `start` on lie in.

    `rows` are those of the head behind the `front` shared slots.
    """
    number = start // SHARED_SLOTS
    shared = tl.load(blocks + number, mask=start < front, other=0).to(rows.dtype)
    shared = shared + (kv_head - number) * SHARED_SLOTS * DIM
    return tl.multiple_of(tl.where(start < front, shared, rows - front * DIM), ALIGNED)


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
@triton.jit(do_not_specialize=["rows", "pairs", "levels", "front"])
def _tree_attention_kernel(
    queries, keys, values, key_blocks, value_blocks, table, sinks, out,
    rows, pairs, levels, front, scale, softcap, key_head_stride, value_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr, CAPPED: tl.constexpr, COLUMNS: tl.constexpr,
    SHARED_SLOTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    # a program's rows are (row, query head) pairs that share one key/value head
    from_pair = tl.program_id(0) * pairs
    pair = from_pair + tl.arange(0, BLOCK_ROWS)
    row = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    d, v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    real = (row < rows) & (pair < from_pair + pairs)
    in_key, in_value = (d < HEAD_DIM)[None, :], (v < VALUE_DIM)[None, :]
    place = row * (tl.num_programs(1) * GROUP) + head
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
    size = COLUMNS + levels
    stop = _shared_stop(table + row * size, real, BLOCK_SLOTS)
    # slots that none of the rows sees are not read
    first = tl.load(table + row * size + 1, mask=real, other=2147483647)

    last = tl.max(stop)
    for start in range(tl.min(first) // BLOCK_SLOTS * BLOCK_SLOTS, last, BLOCK_SLOTS):
        slot = start + tl.arange(0, BLOCK_SLOTS)
        here = (slot < last)[:, None]
        if key_blocks is None:
            own_keys, own_values = keys, values
        else:
            own_keys = _piece(start, keys, key_blocks, front, kv_head, HEAD_DIM, SHARED_SLOTS,
                              ALIGNED)  # fmt: skip
            own_values = _piece(start, values, value_blocks, front, kv_head, VALUE_DIM,
                                SHARED_SLOTS, ALIGNED)  # fmt: skip
        key = tl.load(own_keys + slot[:, None] * HEAD_DIM + d[None, :],
                      mask=here & in_key, other=0.0)  # fmt: skip
        value = tl.load(own_values + slot[:, None] * VALUE_DIM + v[None, :],
                        mask=here & in_value, other=0.0)  # fmt: skip
        seen = (slot[None, :] < stop[:, None]) & (slot[None, :] >= first[:, None])
        scores = tl.where(seen, _scores(query, key, scale, softcap, CAPPED), float("-inf"))
        top, total, output = _accumulate(scores, value, top, total, output)

    # What follows are blocks that each row has to itself: none in a pass without a tree. They lie
    # behind all shared slots, which are committed.
    if key_blocks is not None:
        keys -= front * HEAD_DIM
        values -= front * VALUE_DIM
    from_row = from_pair // GROUP
    own_rows = tl.minimum((from_pair + pairs - 1) // GROUP + 1, rows) - from_row
    own_blocks = tl.where(levels > 0, 1 + tl.cdiv(levels, BLOCK_SLOTS), 0)
    for step in range(0, own_rows * own_blocks):
        one = from_row + step // own_blocks
        own = table + one * size
        end, from_position, in_place = tl.load(own) + 1, tl.load(own + 1), tl.load(own + 2)
        tree_start = tl.load(own + 3)
        start = _shared_stop(own, True, BLOCK_SLOTS) + step % own_blocks * BLOCK_SLOTS
        position = start + tl.arange(0, BLOCK_SLOTS)
        here = (position < end)[:, None]
        moved = (position >= in_place) & (position < end)
        slot = tl.load(own + COLUMNS + position - tree_start, mask=moved, other=0)
        slot = tl.where(moved, slot, position)
        key = tl.load(keys + slot[:, None] * HEAD_DIM + d[None, :],
                      mask=here & in_key, other=0.0)  # fmt: skip
        value = tl.load(values + slot[:, None] * VALUE_DIM + v[None, :],
                        mask=here & in_value, other=0.0)  # fmt: skip
        seen = ((position < end) & (position >= from_position))[None, :] & (row == one)[:, None]
        scores = tl.where(seen, _scores(query, key, scale, softcap, CAPPED), float("-inf"))
        top, total, output = _accumulate(scores, value, top, total, output)

    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place[:, None] * VALUE_DIM + v[None, :], output.to(out.dtype.element_ty),
             mask=real[:, None] & in_value)  # fmt: skip


@triton.jit
def _shared_stop(own, real, BLOCK_SLOTS: tl.constexpr):
    """Where the blocks end that rows share with others: those whose slots are all in place."""
    end = tl.load(own, mask=real, other=-1) + 1
    in_place = tl.load(own + 2, mask=real, other=0)
    return tl.where(in_place >= end, end, in_place // BLOCK_SLOTS * BLOCK_SLOTS)


def tree_attention(
    queries: Tensor,
    keys: Tensor | SplitRows,
    values: Tensor | SplitRows,
    mask: TreeMask,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """tree_attention_ref in Triton; keys and values may be views of a larger cache.

    They are copied first where the slots of a head are not contiguous, as with values that were
    expanded from a latent together with their keys.
    """
    rows, heads, head_dim = queries.shape
    key_blocks = value_blocks = None
    front = 0
    if isinstance(keys, SplitRows):
        assert isinstance(values, SplitRows), "both are or none"
        front = keys.front.slots
        key_blocks, value_blocks = keys.front.addresses, values.front.addresses
        keys, values = keys.own[0], values.own[0]
    assert isinstance(values, Tensor), "both are or none"
    kv_heads, value_dim = keys.shape[0], values.shape[2]
    keys, values = (
        cache if cache.stride()[1:] == (cache.shape[2], 1) else cache.contiguous()
        for cache in (keys, values)
    )
    queries = queries.contiguous()
    out = queries.new_empty(rows, heads, value_dim)
    group = heads // kv_heads
    block_d, block_v = (max(16, triton.next_power_of_2(size)) for size in (head_dim, value_dim))
    block_rows, block_slots, stages = _blocks(max(block_d, block_v), queries.element_size())
    pairs = _pairs(block_rows, group, mask, block_slots)
    scale = scale or 1 / math.sqrt(head_dim)
    aligned = math.gcd(_ALIGNED_BYTES, *(size * keys.itemsize for size in (head_dim, value_dim)))
    _tree_attention_kernel[triton.cdiv(rows * group, pairs), kv_heads](
        queries, keys, values, key_blocks, value_blocks, mask.table,
        None if sinks is None else sinks.float(), out, rows, pairs, mask.levels, front,
        scale if softcap is None else scale / softcap, softcap or 1.0,
        keys.stride(0), values.stride(0),
        GROUP=group, HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_D=block_d, BLOCK_V=block_v,
        BLOCK_ROWS=block_rows, BLOCK_SLOTS=block_slots, CAPPED=softcap is not None,
        COLUMNS=COLUMNS, SHARED_SLOTS=BLOCK_SLOTS, ALIGNED=aligned,
        num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _pairs(block_rows: int, group: int, mask: TreeMask, block_slots: int) -> int:
    """Pairs of a row and a query head for each program.

    A node's own blocks are computed for the whole tile. So a program gets few nodes, but the more
    of them the longer the prefix that they share.
    """
    if not mask.levels:
        return block_rows
    own_blocks = 1 + triton.cdiv(mask.levels, block_slots)
    nodes = 2 + mask.about // block_slots // own_blocks
    return min(nodes, max(1, block_rows // group)) * group if group <= block_rows else block_rows


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
        return (16, 32, 2) if block_d <= 64 else (16, 16, 1)
    return 64 if block_d <= 128 else 32, 32, 2
