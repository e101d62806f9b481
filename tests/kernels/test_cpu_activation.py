"""Activations against double precision; an element's bits depend on nothing else."""

from __future__ import annotations

import pytest
import torch
from other_cpu import other_cpu
from specexec_kernels import cpu_activation, cpu_jit
from specexec_kernels.cpu_activation import Activation
from torch.nn import functional

EXACT = {
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def numbers(count: int) -> torch.Tensor:
    wide = torch.linspace(-110, 110, count)
    return torch.cat([wide, wide / 50, torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e4, -3e4])])


@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_against_double_precision(
    activation: Activation, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lanes > cpu_jit.lanes():
        pytest.skip("no registers of that width")
    other_cpu(monkeypatch, lanes=lanes)
    for dtype, relative in ((torch.float32, 4e-6), (torch.bfloat16, 2**-8)):
        x = numbers(5001).to(dtype)
        exact = EXACT[activation](x.double())
        found = cpu_activation.apply(activation, x)
        assert found.dtype == dtype
        # next to nothing is left of large negative numbers
        assert ((found.double() - exact).abs() <= relative * exact.abs() + 1e-9 * x.abs()).all()


@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_elements_bits_are_its_own(activation: Activation, dtype: torch.dtype) -> None:
    x = torch.randn(9, 1357, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = cpu_activation.apply(activation, x)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (1, 4, 9):
                assert torch.equal(cpu_activation.apply(activation, x[-rows:]), together[-rows:])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(cpu_activation.apply(activation, x.t()), together.t())


def test_not_a_number_stays_one() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert cpu_activation.apply("silu", torch.tensor([torch.nan], dtype=dtype)).isnan().all()


def test_nothing_at_all() -> None:
    assert cpu_activation.apply("silu", torch.zeros(2, 0)).shape == (2, 0)
