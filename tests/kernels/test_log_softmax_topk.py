"""Fused log-softmax + top-k against the reference."""

from __future__ import annotations

import pytest
import torch
from specexec_kernels.log_softmax_topk import log_softmax_topk_ref


@pytest.mark.parametrize(
    ("rows", "vocab", "k"),
    [(1, 5, 5), (3, 1024, 4), (2, 2500, 17), (1, 1100, 65), (1, 700, 700), (1, 1300, 1100)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(rows: int, vocab: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    from specexec_kernels.triton_topk import log_softmax_topk

    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype) * 4
    values, columns = log_softmax_topk(logits.to(device), k)
    expected_values, expected_columns = log_softmax_topk_ref(logits, k)
    assert torch.equal(columns.cpu(), expected_columns)  # bfloat16 rows are full of ties
    torch.testing.assert_close(values.cpu(), expected_values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [4, 100])
def test_forbidden_tokens_and_strided_rows(k: int, device: torch.device) -> None:
    from specexec_kernels.triton_topk import log_softmax_topk

    logits = torch.full((2, 1300), -torch.inf)
    logits[:, [7, 1200]] = torch.tensor([1.0, 2.0])
    values, columns = log_softmax_topk(logits.to(device), k)
    expected_values, expected_columns = log_softmax_topk_ref(logits, k)
    assert torch.equal(columns.cpu(), expected_columns)
    torch.testing.assert_close(values.cpu(), expected_values)
    wide = torch.randn(3, 40)
    found = log_softmax_topk(wide[:, ::2].to(device), 3)[1]
    assert torch.equal(found.cpu(), log_softmax_topk_ref(wide[:, ::2], 3)[1])


@pytest.mark.parametrize("k", [8, 80])
def test_the_lower_of_equal_columns_is_first(k: int, device: torch.device) -> None:
    """Zeros of both signs are equal, and negative numbers are sorted among themselves."""
    from specexec_kernels.triton_topk import log_softmax_topk

    logits = torch.tensor([0.0, -0.0, -1.5, -2.0, 1.0, -1.5]).repeat(1, 200)
    values, columns = log_softmax_topk(logits.to(device), k)
    expected_values, expected_columns = log_softmax_topk_ref(logits, k)
    assert torch.equal(columns.cpu(), expected_columns)
    torch.testing.assert_close(values.cpu(), expected_values)


def test_probabilities_sum_to_one() -> None:
    values, columns = log_softmax_topk_ref(torch.randn(2, 50), 50)
    torch.testing.assert_close(values.exp().sum(1), torch.ones(2))
    assert columns.sort(1).values.tolist() == [list(range(50))] * 2


@pytest.mark.parametrize("k", [0, 6])
def test_k_out_of_range(k: int) -> None:
    from specexec_kernels.triton_topk import log_softmax_topk

    for function in (log_softmax_topk, log_softmax_topk_ref):
        with pytest.raises(ValueError, match=f"not {k}"):
            function(torch.zeros(1, 5), k)
