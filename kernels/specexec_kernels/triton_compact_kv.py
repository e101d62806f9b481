# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Cache compaction in Triton; compact_kv has the reference."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["count", "start"])
def _compact_kernel(
    cache, kept, count, start, head_stride, slot_stride, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    cache += tl.program_id(0).to(tl.int64) * head_stride
    # One program moves a head's rows one after another: since kept[i] >= start + i rises, no row is
    # overwritten before it was read. The barrier keeps a fast thread from writing ahead of a slow
    # one where a short row is loaded by several threads.
    for i in range(count):
        source = tl.load(kept + i)
        row = tl.load(cache + source * slot_stride + d, mask=d < HEAD_DIM)
        tl.debug_barrier()
        tl.store(cache + (start + i).to(tl.int64) * slot_stride + d, row, mask=d < HEAD_DIM)


def compact_kv(cache: Tensor, kept: Tensor, start: int) -> None:
    """compact_kv_ref in Triton.

    Raises:
        ValueError: rows of the cache are not contiguous.
    """
    if cache.stride(2) != 1:
        raise ValueError(f"cache rows must be contiguous, not of strides {cache.stride()}")
    heads, _, head_dim = cache.shape
    _compact_kernel[(heads,)](
        cache, kept, kept.shape[0], start, cache.stride(0), cache.stride(1),
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=1,
        enable_fp_fusion=True,
    )  # fmt: skip
