"""Products of any shape and stored dtype: whole strips go to a kernel, edges are padded."""

from __future__ import annotations

import itertools

import pytest
import torch
from specexec_kernels import cpu_jit, cpu_linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (8, 64), (33, 70), (100, 96), (64, 64))


@pytest.mark.parametrize("rows", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_products_of_any_shape(rows: torch.dtype, stored: torch.dtype) -> None:
    for (outputs, inputs), count in itertools.product(SHAPES, (1, 5, 30)):
        generator = torch.Generator().manual_seed(inputs)
        weight = torch.randn(outputs, inputs, generator=generator).to(stored)
        x = torch.randn(count, inputs, generator=generator).to(rows)
        found = cpu_linear.product(x, weight)
        assert found.dtype == torch.float32
        exact = x.double() @ weight.double().t()
        allowed = (
            4 * torch.finfo(torch.float32).eps * (x.double().abs() @ weight.double().abs().t())
        )
        assert ((found - exact).abs() <= allowed).all()
        assert torch.equal(cpu_linear.product(x[-1:], weight), found[-1:])


def test_what_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(32, 32, dtype=torch.bfloat16)
    for there, pairs in itertools.product((True, False), repeat=2):
        monkeypatch.setattr(cpu_jit, "has_matmul", lambda dtype, there=there: there)
        monkeypatch.setattr(cpu_jit, "has_dot", lambda pairs=pairs: pairs)
        assert cpu_linear.takes(torch.float32, weight)
        assert cpu_linear.takes(torch.bfloat16, weight) == (pairs or not there)
        assert cpu_linear.takes(torch.float16, weight)  # of two dtypes: PyTorch would convert
        assert cpu_linear.takes(torch.float16, weight.half()) == (not there)
    assert not cpu_linear.takes(torch.float64, weight)
    assert not cpu_linear.takes(torch.float32, weight.double())
    assert not cpu_linear.takes(torch.float32, weight.to("meta"))
