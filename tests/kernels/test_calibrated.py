"""GPTQ's error correction: exact where nothing is to correct, better where inputs correlate."""

from __future__ import annotations

import pytest
import torch
from specexec_kernels.calibrated import calibrated, quantize_calibrated
from specexec_kernels.fitted import fit
from specexec_kernels.formats.gptq import Gptq
from torch import Tensor

GROUP = 16


def weight_and_rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight (outputs, inputs), and rows of inputs of which some go together."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, 64, generator=generator)
    rows = torch.randn(600, 24, generator=generator) @ torch.randn(24, 64, generator=generator)
    return weight, rows + 0.1 * torch.randn(600, 64, generator=generator)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_independent_inputs_get_the_codes_of_the_fitted_grids(bits: int) -> None:
    weight, _ = weight_and_rows()
    fitted = fit(weight, bits, GROUP)
    broken = torch.full((64, 64), torch.nan)
    for moments in (torch.eye(64), 7 * torch.eye(64), torch.zeros(64, 64), broken):
        found = calibrated(weight, moments, bits, GROUP)
        assert torch.equal(found.scales, fitted.scales)
        assert torch.equal(found.zeros, fitted.zeros)
        assert torch.equal(found.codes, fitted.codes)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scales_care_most_for_the_inputs_that_are_large_in_the_text(bits: int) -> None:
    weight, _ = weight_and_rows()
    sizes = torch.logspace(-2, 2, 64)[torch.randperm(64)]  # independent inputs: nothing to make up

    def error(found: Tensor) -> float:
        return float((weight - found).square().sum(0) @ sizes)

    found = calibrated(weight, torch.diag(sizes), bits, GROUP)
    assert error(found.weight()) < 0.8 * error(fit(weight, bits, GROUP).weight())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_outputs_over_rows_whose_inputs_go_together_are_nearer(bits: int) -> None:
    weight, rows = weight_and_rows()

    def error(found: Tensor) -> float:
        return float(((weight - found) @ rows.T).square().mean())

    calibration, kept_apart = rows[:500], rows[500:]
    found = calibrated(weight, calibration.T @ calibration, bits, GROUP)
    fitted = fit(weight, bits, GROUP)
    rows = kept_apart
    assert error(found.weight()) < 0.5 * error(fitted.weight())


def test_codes_are_in_range_and_packed_as_they_are() -> None:
    weight, rows = weight_and_rows()
    rows[:, 5] = 0.0  # an input that the text never has
    moments = rows.T @ rows
    found = calibrated(weight, moments, 3, GROUP)
    assert found.codes.min() >= 0
    assert found.codes.max() <= 7
    packed = quantize_calibrated(weight, moments, Gptq(3, GROUP))
    assert torch.equal(packed.unpack(), found.weight())
