"""A kernel reads what the CPU has written to pinned memory."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("n_bytes", [1, 7, 8, 33, 8192, 8193, 40_000])
def test_every_byte_arrives_at_every_launch(n_bytes: int, device: torch.device) -> None:
    from specexec_kernels.triton_pinned import read_pinned

    source = torch.empty(n_bytes, dtype=torch.uint8)
    if device.type == "cuda":
        source = source.pin_memory()
    target = torch.full((n_bytes + 9,), 7, dtype=torch.uint8, device=device)
    for seed in range(3):
        numbers = torch.randint(256, (n_bytes,), generator=torch.Generator().manual_seed(seed))
        source.copy_(numbers)
        read_pinned(target[:n_bytes], source)
        assert target[:n_bytes].tolist() == numbers.tolist()  # which waits for the kernel
        assert target[n_bytes:].tolist() == [7] * 9
