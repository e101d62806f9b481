"""The norm of rows in one launch against the formula."""

from __future__ import annotations

import pytest
import torch
from specexec_kernels.triton_norm import rms_norm
from torch import Tensor

EPS = 1e-5
LLAMA = {"centred": False, "rounded": True}


def rows_of(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    sizes = torch.tensor([1e-3, 1.0, 30.0]).repeat(count)[:count, None]
    return (torch.randn(count, width, generator=generator) * sizes).to(dtype).to(device)


def weight_of(width: int, device: torch.device) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(1)).to(device)


# narrower than a program's rows, not a power of two, and wider than what a program has at once
@pytest.mark.parametrize("width", [16, 80, 576, 5120])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
def test_norm(
    width: int, dtype: torch.dtype, centred: bool, rounded: bool, device: torch.device
) -> None:
    x, weight = rows_of(3, width, dtype, device), weight_of(width, device)
    found = rms_norm(x, weight, EPS, centred=centred, rounded=rounded, out_dtype=dtype)
    wide = x.double()
    wide = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    factor = 1.0 + weight.double() if centred else weight.double()
    error = (found.double() - wide * factor).abs()
    # two roundings to the dtype, and of float32 in the sum and what follows it
    allowed = 2 * torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps
    assert found.dtype == dtype
    assert (error <= allowed * (wide * factor).abs() + 1e-7).all()


def test_rows_of_the_residual_stream_become_the_compute_dtype(device: torch.device) -> None:
    x, weight = rows_of(2, 64, torch.float32, device), weight_of(64, device)
    found = rms_norm(x, weight, EPS, **LLAMA, out_dtype=torch.float16)
    exact = rms_norm(x, weight, EPS, **LLAMA, out_dtype=torch.float32)
    assert torch.equal(found, exact.half())


@pytest.mark.parametrize("width", [16, 128, 5120])
def test_a_row_has_the_same_bits_among_any_number_of_others(
    width: int, device: torch.device
) -> None:
    x, weight = rows_of(129, width, torch.float16, device), weight_of(width, device)
    together = rms_norm(x, weight, EPS, **LLAMA, out_dtype=torch.float16)
    for first, last in ((0, 1), (5, 21), (60, 129)):
        own = rms_norm(x[first:last], weight, EPS, **LLAMA, out_dtype=torch.float16)
        assert torch.equal(own, together[first:last]), (first, last)


def test_heads_between_others_are_normed_where_they_lie(device: torch.device) -> None:
    """As views of the queries in rows that hold keys and values too."""
    x, weight = rows_of(6, 3 * 32, torch.float16, device), weight_of(32, device)
    for part in x.split(32, dim=-1):
        found = rms_norm(part[None], weight, EPS, **LLAMA, out_dtype=torch.float16)
        own = rms_norm(part.contiguous()[None], weight, EPS, **LLAMA, out_dtype=torch.float16)
        assert found.shape == (1, 6, 32)
        assert torch.equal(found, own)
