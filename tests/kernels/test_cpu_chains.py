"""Products and softmax of activations against double precision; a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from other_cpu import other_cpu
from specexec_kernels import cpu_chains, cpu_jit
from torch import Tensor


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_double_precision(
    dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One term, a few, and more than a block of them; columns that fill no vector."""
    if lanes > cpu_jit.lanes():
        pytest.skip("no registers of that width")
    other_cpu(monkeypatch, lanes=lanes)
    for terms, columns in ((1, 3), (7, 40), (9, 64), (64, 33), (301, 64)):
        left, right = numbers(2, 3, 5, terms).to(dtype), numbers(3, terms, columns).to(dtype)
        found = cpu_chains.product(left, right)
        assert found.dtype == torch.float32
        exact = left.double() @ right.double()
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
        turned = right.transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(cpu_chains.product(left, turned), found)
    scores = numbers(2, 5, 301).to(dtype)
    found = cpu_chains.softmax(scores)
    assert found.dtype == dtype
    exact = torch.softmax(scores.double(), dim=-1)
    assert (found.double() - exact).abs().max() <= (2**-20 if dtype == torch.float32 else 2**-9)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_a_row_does_not_see_changes_nothing(threads: int) -> None:
    """Neither other rows nor hidden slots, in between or behind."""
    slots, heads, size = 200, 3, 24
    keys, values = numbers(heads, slots, size), numbers(heads, slots, size)
    queries, seen = numbers(heads, 17, size), torch.rand(17, slots) < 0.7
    seen[:, 0] = True

    def attended(rows: slice, kept: Tensor) -> Tensor:
        scores = cpu_chains.product(queries[:, rows], keys[:, kept].transpose(1, 2))
        scores = scores.masked_fill(~seen[rows][:, kept], -torch.inf)
        return cpu_chains.product(cpu_chains.softmax(scores), values[:, kept])

    before = torch.get_num_threads()
    together = attended(slice(None), torch.arange(slots))
    try:
        torch.set_num_threads(threads)
        for row in range(17):
            alone = attended(slice(row, row + 1), seen[row].nonzero()[:, 0])
            assert torch.equal(alone[:, 0], together[:, row])
    finally:
        torch.set_num_threads(before)


def test_no_rows() -> None:
    assert cpu_chains.product(numbers(2, 0, 16), numbers(2, 16, 5)).shape == (2, 0, 5)
    assert not cpu_chains.takes(numbers(2, 2), numbers(2, 2).double())
