"""Cache compaction against plain indexing."""

from __future__ import annotations

import pytest
import torch
from specexec_kernels.compact_kv import compact_kv_ref


@pytest.mark.parametrize(
    ("start", "kept", "head_dim"),
    [(0, [0, 1, 2], 64), (4, [5, 9, 11], 80), (3, [], 96), (2, [2, 3, 9], 128), (7, [11], 5)],
)
def test_kernel(start: int, kept: list[int], head_dim: int, device: torch.device) -> None:
    from specexec_kernels.triton_compact_kv import compact_kv

    cache = torch.randn(3, 12, head_dim)
    slots = torch.tensor(kept, dtype=torch.int64)
    expected = torch.cat([cache[:, :start], cache[:, slots]], dim=1)
    by_reference, found = cache.clone(), cache.clone().to(device)
    compact_kv_ref(by_reference, slots, start)
    compact_kv(found, slots.to(device), start)
    n = start + len(kept)
    assert torch.equal(by_reference[:, :n], expected)
    assert torch.equal(found[:, :n].cpu(), expected)
    assert torch.equal(found[:, n:].cpu(), cache[:, n:]), "rows behind the kept ones were touched"
