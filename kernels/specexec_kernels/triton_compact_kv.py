# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Cache compaction in Triton; compact_kv has the reference."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _move_rows(rows, kept, count, start, slot_stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    # One program moves a head's rows one after another: since kept[i] >= start + i rises, no row is
    # overwritten before it was read. The barrier keeps a fast thread from writing ahead of a slow
    # one where a short row is loaded by several threads.
    d = tl.arange(0, BLOCK)
    for i in range(count):
        source = tl.load(kept + i)
        row = tl.load(rows + source * slot_stride + d, mask=d < DIM)
        tl.debug_barrier()
        tl.store(rows + (start + i).to(tl.int64) * slot_stride + d, row, mask=d < DIM)


@triton.jit(do_not_specialize=["count", "start"])
def _compact_kernel(
    keys, values, kept, count, start,
    key_head_stride, key_stride, value_head_stride, value_stride,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        keys += head * key_head_stride
        _move_rows(keys, kept, count, start, key_stride, KEY_DIM, KEY_BLOCK)
    else:
        values += head * value_head_stride
        _move_rows(values, kept, count, start, value_stride, VALUE_DIM, VALUE_BLOCK)


def compact_kv(keys: Tensor, values: Tensor, kept: Tensor, start: int) -> None:
    """compact_kv_ref in Triton, one launch for both.

    Raises:
        ValueError: rows of the cache are not contiguous.
    """
    for rows in (keys, values):
        if rows.stride(2) != 1:
            raise ValueError(f"cache rows must be contiguous, not of strides {rows.stride()}")
    key_dim, value_dim = keys.shape[2], values.shape[2]
    _compact_kernel[(keys.shape[0], 2)](
        keys, values, kept, kept.shape[0], start,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEY_BLOCK=triton.next_power_of_2(key_dim), VALUE_BLOCK=triton.next_power_of_2(value_dim),
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
