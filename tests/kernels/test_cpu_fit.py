"""The compiled fit and rounding, held to plain PyTorch in float64 and to GPTQ as published."""

from __future__ import annotations

import pytest
import torch
from specexec_kernels import cpu_jit
from specexec_kernels.calibrated import calibrated
from specexec_kernels.cpu_fit import RANGES
from specexec_kernels.fitted import Codes, fit
from torch import Tensor

GROUP, INPUTS, OUTPUTS = 32, 96, 40
BITS = (2, 3, 4, 8)


def weight_and_moments(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and moments of inputs of which some go together."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.02
    mixed = torch.randn(40, INPUTS, generator=generator)
    rows = torch.randn(500, 40, generator=generator) @ mixed
    rows += 0.1 * torch.randn(500, INPUTS, generator=generator)
    return weight, rows.T @ rows


def least_errors(weight: Tensor, bits: int, shares: Tensor) -> Tensor:
    """The least error of each (output, group) over all scales that are tried, in float64."""
    grouped, top = weight.double().view(OUTPUTS, -1, GROUP), 2**bits - 1
    shares = shares.double().view(-1, GROUP)
    lowest, highest = (grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0))
    found = []

    def tried(scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        scale, zero = scale.half().double()[..., None], zero.round().clamp(0, top)[..., None]
        steps = ((grouped / scale).round() + zero).clamp(0, top) - zero
        found.append(((grouped - scale * steps).square() * shares).sum(-1))
        fit = (grouped * steps * shares).sum(-1) / (steps.square() * shares).sum(-1)
        moved = ((steps + zero - grouped / scale) * shares).sum(-1) / shares.sum(-1)
        return fit, moved

    nearest = 2 * torch.maximum(-lowest, highest) / top
    tried(nearest, torch.full_like(nearest, 2.0 ** (bits - 1)))
    for share in RANGES:
        scale = (share * (highest - lowest) / top).half().double()
        tried(*tried(scale, -share * lowest / scale))
    return torch.stack(found).amin(0)


@pytest.mark.parametrize("bits", BITS)
def test_scales_are_the_best_of_those_that_are_tried(bits: int) -> None:
    weight, _ = weight_and_moments()
    importance = torch.logspace(-2, 2, INPUTS)[torch.randperm(INPUTS)]
    off = (fit(weight, bits, GROUP, importance).weight() - weight).double().square()
    errors = (off * importance).view(OUTPUTS, -1, GROUP).sum(-1)
    torch.testing.assert_close(errors, least_errors(weight, bits, importance), rtol=1e-3, atol=0)


def published(weight: Tensor, moments: Tensor, found: Codes, bits: int) -> Tensor:
    """Algorithm 1 of arXiv:2210.17323 in float64, one column after another, on the same grids."""
    damped = moments.double() + 0.01 * moments.diagonal().mean() * torch.eye(INPUTS)
    factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    left, codes = weight.double().clone(), []
    for column in range(INPUTS):
        scale, zero = (each[:, column // GROUP].double() for each in (found.scales, found.zeros))
        code = ((left[:, column] / scale).round() + zero).clamp(0, 2**bits - 1)
        error = (left[:, column] - scale * (code - zero)) / factor[column, column]
        left[:, column + 1 :] -= error[:, None] * factor[column, column + 1 :]
        codes.append(code.int())
    return torch.stack(codes, 1)


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_those_of_the_published_algorithm(bits: int) -> None:
    weight, moments = weight_and_moments()
    found = calibrated(weight, moments, bits, GROUP)
    same = found.codes == published(weight, moments, found, bits)
    # a column near the middle of two codes may round otherwise, and its output then goes apart
    assert same.float().mean() > 0.99
    assert same.all(1).float().mean() > 0.9
    assert not torch.equal(found.codes, fit(weight, bits, GROUP).codes)


@pytest.mark.parametrize("outputs", [1, cpu_jit.lanes() + 1, 3 * cpu_jit.lanes()])
def test_an_output_s_codes_are_its_own(outputs: int) -> None:
    weight, _ = weight_and_moments()
    every, some = fit(weight, 4, GROUP), fit(weight[:outputs], 4, GROUP)
    assert torch.equal(some.weight(), every.weight()[:outputs])
    assert some.codes.shape == (outputs, INPUTS)


def test_no_number_becomes_a_code_outside_its_bits() -> None:
    weight, moments = weight_and_moments()
    weight[3, 5], weight[4, 6] = torch.nan, torch.inf
    for found in (fit(weight, 3, GROUP), calibrated(weight, moments, 3, GROUP)):
        assert found.codes.min() >= 0
        assert found.codes.max() <= 7
