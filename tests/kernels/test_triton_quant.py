"""Triton dequantize and fused product against the PyTorch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packed import FORMATS, random_weight
from specexec_kernels.dequantize import dequantize_ref
from specexec_kernels.packing import PackedFormat, PackedWeight

SHAPES = [(96, 64, 32), (64, 160, 64), (160, 32, 96)]


def on_device(weight: PackedWeight, device: torch.device) -> PackedWeight:
    names = ("qweight", "qzeros", "scales", "g_idx")
    tensors = {name: getattr(weight, name) for name in names}
    return replace(weight, **{n: t.to(device) for n, t in tensors.items() if t is not None})


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("shuffled", [False, True])
def test_dequantize_is_exact(fmt: PackedFormat, shuffled: bool, device: torch.device) -> None:
    from specexec_kernels import triton_quant

    for inputs, outputs, group in SHAPES:
        weight = random_weight(fmt, inputs, outputs, group, shuffled=shuffled)
        found = triton_quant.dequantize(on_device(weight, device), torch.float32)
        assert torch.equal(found.cpu(), dequantize_ref(weight))


@pytest.mark.parametrize("fmt", FORMATS[1::2] + FORMATS[-1:], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_products(fmt: PackedFormat, rows: int, device: torch.device) -> None:
    from specexec_kernels import triton_quant

    for inputs, outputs, group in SHAPES[:2]:
        weight = random_weight(fmt, inputs, outputs, group, shuffled=rows == 5)
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        found = triton_quant.quantized_matmul(x.to(device), on_device(weight, device)).cpu()
        dense = dequantize_ref(weight).double()
        allowed = 4 * torch.finfo(torch.float32).eps * (x.double().abs() @ dense.abs())
        assert ((found - x.double() @ dense).abs() <= allowed).all()


def test_half_precision(device: torch.device) -> None:
    """Error against float32 is at most twice that of PyTorch in the same dtype."""
    from specexec_kernels import triton_quant

    weight = random_weight(PackedFormat(4, stored_minus_one=True), 128, 64, 32)
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(0)).to(torch.float16)
    exact = x.float() @ dequantize_ref(weight)
    torch_error = (x.float() @ dequantize_ref(weight, x.dtype).float()).to(x.dtype) - exact
    found = triton_quant.quantized_matmul(x.to(device), on_device(weight, device)).cpu()
    assert found.dtype == x.dtype
    assert (found - exact).abs().max() <= 2 * torch_error.abs().max()


def test_sums_may_be_kept_in_float32(device: torch.device) -> None:
    from specexec_kernels import triton_quant

    weight = random_weight(PackedFormat(4, stored_minus_one=True), 128, 64, 32)
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(0)).to(torch.float16)
    found = triton_quant.quantized_matmul(x.to(device), on_device(weight, device), torch.float32)
    assert found.dtype == torch.float32
    exact = x.double() @ dequantize_ref(weight, x.dtype).double()
    torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-5, atol=1e-5)
