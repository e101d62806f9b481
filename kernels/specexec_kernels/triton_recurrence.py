# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Linear recurrences over the rows of a tree in Triton; recurrence.by_rows is the reference.

A program has a head and a block of its value dimensions, none of which needs the others, and takes
the rows depth first. Along a chain its state stays in registers. In a tree, states that later rows
come behind wait in global memory, few of them and small enough for the GPU's cache. Every row runs
the same operations in the same order, and none is fused with another, so that its bits depend on
its ancestors alone, in a chain as in a tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexec_kernels.recurrence import Order

_CELLS = 4096  # elements of a state that a program holds: 32 in each of 128 threads


@triton.jit(do_not_specialize=["steps"])
def _recurrence_kernel(
    state, last, queries, keys, values, decays, betas, out, order, scratch,
    heads, key_heads, steps, value_dim,
    KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    DECAY_DIMS: tl.constexpr, CORRECTS: tl.constexpr, ONE_PLACE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    k = tl.arange(0, KEY_BLOCK)
    real_key, real_column = k < KEY_DIM, column < value_dim
    real = real_key[:, None] & real_column[None, :]
    cell = (head * KEY_DIM + k[:, None]) * value_dim + column[None, :]
    kept = tl.load(state + cell, mask=real, other=0.0)
    if not ONE_PLACE:
        tl.store(scratch + cell, kept, mask=real)
    for step in range(steps):
        row = tl.load(order + 3 * step)
        if not ONE_PLACE:
            # another thread may have written what this one reads
            tl.debug_barrier()
            parent = tl.load(order + 3 * step + 1)
            kept = tl.load(
                scratch + parent * heads * KEY_DIM * value_dim + cell, mask=real, other=0.0
            )
        own = row * heads + head
        key_at = (row * key_heads + head // (heads // key_heads)) * KEY_DIM + k
        key = tl.load(keys + key_at, mask=real_key, other=0.0)
        query = tl.load(queries + key_at, mask=real_key, other=0.0)
        value = tl.load(values + own * value_dim + column, mask=real_column, other=0.0)
        if DECAY_DIMS == 0:
            kept *= tl.load(decays + own)
        elif DECAY_DIMS == 1:
            kept *= tl.load(decays + own * KEY_DIM + k, mask=real_key, other=0.0)[:, None]
        else:
            element = (own * KEY_DIM + k[:, None]) * value_dim + column[None, :]
            kept *= tl.load(decays + element, mask=real, other=0.0)
        if CORRECTS:
            value -= tl.sum(kept * key[:, None], axis=0)
        kept += key[:, None] * (value * tl.load(betas + own))[None, :]
        answer = tl.sum(kept * query[:, None], axis=0)
        tl.store(out + own * value_dim + column, answer, mask=real_column)
        if not ONE_PLACE:
            place = tl.load(order + 3 * step + 2)
            tl.debug_barrier()
            tl.store(scratch + place * heads * KEY_DIM * value_dim + cell, kept, mask=real)
    tl.store(last + cell, kept, mask=real)


def recurrence(
    state: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    order: Order,
    *,
    corrects: bool,
) -> tuple[Tensor, Tensor]:
    """See recurrence.recurrence; `value_dim` need not fill vectors."""
    heads, key_dim, value_dim = state.shape
    state, queries, keys, values, decays, betas = (
        tensor.contiguous() for tensor in (state, queries, keys, values, decays, betas)
    )
    out, last = torch.zeros_like(values), torch.empty_like(state)
    one_place = order.places == 1
    scratch = state.new_empty(0 if one_place else order.places * state.numel())
    key_block = triton.next_power_of_2(key_dim)
    # not smaller for fewer columns: a tile of another shape would add over keys in another order
    value_block = max(16, _CELLS // key_block)
    _recurrence_kernel[(heads, triton.cdiv(value_dim, value_block))](
        state, last, queries, keys, values, decays, betas, out,
        order.steps_on(state.device), scratch,
        heads, keys.shape[1], len(order.steps), value_dim,
        KEY_DIM=key_dim, KEY_BLOCK=key_block, VALUE_BLOCK=value_block,
        DECAY_DIMS=decays.ndim - 2, CORRECTS=corrects, ONE_PLACE=one_place,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out, last
