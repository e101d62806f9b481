"""Linears whose weights keep the file's dtype, large enough not to be converted whole."""

from __future__ import annotations

import pytest
import torch
from specexec_kernels import cpu_half

from specexec_cli.models import linear
from specexec_cli.models.linear import mixed_linear


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [True, False])
def test_products_of_large_weights(
    stored: torch.dtype, compute: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "TILE_ELEMENTS", 50 * 96)  # tiles that do not divide the outputs
    if not kernel:
        monkeypatch.setattr(cpu_half, "supports", lambda weight: False)
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


def test_a_row_of_a_streamed_linear_has_the_same_bits_in_every_pass() -> None:
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    if not cpu_half.supports(weight):
        pytest.skip("this machine's vectors do not divide the matrix")
    rows = torch.randn(20, 1024, generator=torch.Generator().manual_seed(1))
    assert torch.equal(mixed_linear(rows[7:8], weight, None), mixed_linear(rows, weight, None)[7:8])
