"""Linears whose weights keep the file's dtype."""

from __future__ import annotations

import pytest
import torch
from other_cpu import other_cpu
from specexec_kernels import cpu_matmul

from specexec_cli.models.linear import TransposedLinear, mixed_linear


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taken", [True, False])
def test_products_in_another_dtype(
    stored: torch.dtype, compute: torch.dtype, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels, and as on a device that has none."""
    if not taken:
        monkeypatch.setattr(cpu_matmul, "takes_plain", lambda rows: False)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 96, generator=generator).to(stored)
    bias = torch.randn(128, generator=generator).to(stored)
    rows = torch.randn(2, 3, 96, generator=generator).to(compute)
    for given in (bias, None):
        expected = rows.double() @ weight.double().t() + (0.0 if given is None else bias.double())
        found = mixed_linear(rows, weight, given)
        assert found.dtype == compute
        assert found.shape == (2, 3, 128)
        tolerance = 1e-5 if compute == torch.float32 else 0.1
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_a_streamed_linear_has_the_same_bits_in_every_pass(
    compute: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two bytes on a CPU without arithmetic in them: the others go PyTorch's way."""
    other_cpu(monkeypatch, matmul=False)
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = torch.randn(20, 1024, generator=torch.Generator().manual_seed(1)).to(compute)
    assert torch.equal(mixed_linear(rows[7:8], weight, None), mixed_linear(rows, weight, None)[7:8])


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_without_arithmetic_in_the_dtype_a_product_is_rounded_once(
    compute: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 96, generator=generator).to(compute)
    bias = torch.randn(128, generator=generator).to(compute)
    rows = torch.randn(2, 3, 96, generator=generator).to(compute)
    called = []
    product = cpu_matmul.matmul
    monkeypatch.setattr(
        cpu_matmul, "matmul", lambda x, weight: called.append(x.dtype) or product(x, weight)
    )
    exact = rows.double() @ weight.double().t() + bias.double()
    for native in (False, True):
        other_cpu(monkeypatch, matmul=native)
        found = mixed_linear(rows, weight, bias)
        assert found.dtype == compute
        torch.testing.assert_close(found.double(), exact, atol=0.1, rtol=0.02)
        if not native:
            assert float((found == exact.to(compute)).double().mean()) > 0.99
            assert called == [compute]
    assert len(called) == 1 + cpu_matmul.takes_plain(compute)


def test_no_rows() -> None:
    for size in (64, 1024):
        weight = torch.zeros(size, size, dtype=torch.bfloat16)
        for compute in (torch.float32, torch.bfloat16):
            assert mixed_linear(torch.zeros(1, 0, size, dtype=compute), weight, None).shape == (
                1, 0, size,
            )  # fmt: skip


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_weight_is_rounded_to_the_dtype_of_its_rows(
    stored: torch.dtype, compute: torch.dtype, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was converted when it was loaded."""
    if not there:
        other_cpu(monkeypatch, matmul=False)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(700, 96, generator=generator, dtype=torch.float64).to(stored)
    bias = torch.randn(700, generator=generator).to(stored)
    turned = TransposedLinear(700, 96, bias=False)
    for count in (1, 9):
        rows = torch.randn(count, 96, generator=generator).to(compute)
        expected = mixed_linear(rows, weight.to(compute), bias.to(compute))
        assert torch.equal(mixed_linear(rows, weight, bias), expected)
        rows = torch.randn(count, 700, generator=generator).to(compute)
        found = []
        for each in (weight, weight.to(compute)):
            turned.weight = torch.nn.Parameter(each, requires_grad=False)
            found.append(turned(rows))
        assert torch.equal(*found)
