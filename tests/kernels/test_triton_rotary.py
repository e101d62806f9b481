"""Queries and keys that are turned in one launch, against PyTorch's operations bit for bit."""

from __future__ import annotations

import pytest
import torch
from specexec_kernels.triton_rotary import rotary, takes
from torch import Tensor


def rows_of(heads: int, rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """(1, heads, rows, width), as modelling code has them: a view of rows of heads."""
    found = torch.randn(1, rows, heads, width, generator=torch.Generator().manual_seed(seed))
    return found.to(dtype).transpose(1, 2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    part, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    low, high = part.chunk(2, dim=-1)
    part = part * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]
    return torch.cat([part, rest], dim=-1) if rest.shape[-1] else part


@pytest.mark.parametrize(("q_heads", "k_heads"), [(4, 2), (20, 20), (3, 1)])
# of all elements of a head, and of some
@pytest.mark.parametrize(("head_dim", "width"), [(16, 16), (80, 80), (128, 128), (96, 24)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rotary(
    q_heads: int, k_heads: int, head_dim: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter rounds bfloat16 towards zero")
    q, k = (rows_of(heads, 5, head_dim, dtype, heads).to(device) for heads in (q_heads, k_heads))
    cos, sin = (rows_of(1, 5, width, dtype, seed)[:, 0].contiguous().to(device) for seed in (8, 9))
    assert takes(q, k, cos, sin)
    for found, given in zip(rotary(q, k, cos, sin), (q, k), strict=True):
        expected = turned(given, cos, sin)
        assert torch.equal(found, expected)


def test_what_it_does_not_take() -> None:
    """Several texts at once, angles of another dtype or of more than a head has."""
    q, k = (rows_of(heads, 5, 16, torch.float16, heads) for heads in (4, 2))
    angles = torch.zeros(1, 5, 16, dtype=torch.float16)
    assert takes(q, k, angles, angles)
    assert not takes(q.repeat(2, 1, 1, 1), k.repeat(2, 1, 1, 1), angles, angles)
    assert not takes(q, k, angles.float(), angles.float())
    assert not takes(q[..., :8], k[..., :8], angles, angles)
