"""Cache compaction against plain indexing."""

from __future__ import annotations

import pytest
import torch
from specexec_kernels.compact_kv import compact_kv_ref


@pytest.mark.parametrize(
    ("start", "kept", "head_dims"),
    [
        (0, [0, 1, 2], (64, 64)), (4, [5, 9, 11], (80, 80)), (3, [], (96, 96)),
        (2, [2, 3, 9], (192, 128)), (7, [11], (5, 9)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_kernel(
    start: int, kept: list[int], head_dims: tuple[int, int], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    from specexec_kernels.triton_compact_kv import compact_kv

    caches = [torch.rand(3, 12, head_dim).mul(255).to(dtype) for head_dim in head_dims]
    slots = torch.tensor(kept, dtype=torch.int64)
    expected = [torch.cat([cache[:, :start], cache[:, slots]], dim=1) for cache in caches]
    by_reference = [cache.clone() for cache in caches]
    found = [cache.clone().to(device) for cache in caches]
    compact_kv_ref(*by_reference, slots, start)
    compact_kv(*found, slots.to(device), start)
    n = start + len(kept)
    for one, other, right, before in zip(by_reference, found, expected, caches, strict=True):
        assert torch.equal(one[:, :n], right)
        assert torch.equal(other[:, :n].cpu(), right)
        assert torch.equal(other[:, n:].cpu(), before[:, n:]), "rows behind were touched"
