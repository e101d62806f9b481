"""Fitted quantization: no worse than round-to-nearest anywhere, and within a step's own noise."""

from __future__ import annotations

import pytest
import torch
from quantize_gptq import round_to_nearest
from specexec_kernels import fitted
from specexec_kernels.fitted import fit, quantize_fitted
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import BITS
from torch import Tensor

GROUP = 32


def _weights(kind: str) -> Tensor:
    torch.manual_seed(7)
    if kind == "normal":
        return torch.randn(64, 128) * 0.02
    student = torch.distributions.StudentT(2.5)  # heavy-tailed: a few weights lie far off
    return student.sample((64, 128)) * 0.02


def _by_group(weight: Tensor) -> Tensor:
    return weight.reshape(weight.shape[0], -1, GROUP)


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed"])
@pytest.mark.parametrize("bits", BITS)
def test_every_group_is_no_farther_than_round_to_nearest(bits: int, kind: str) -> None:
    weight = _weights(kind)
    codes, scales = round_to_nearest(weight, bits, GROUP)
    steps = _by_group(codes - 2 ** (bits - 1)).float()
    nearest = scales.float().unsqueeze(-1) * steps
    error = (_by_group(fit(weight, bits, GROUP).weight() - weight)).square().sum(-1)
    baseline = (nearest - _by_group(weight)).square().sum(-1)

    assert (error <= baseline * 1.0001).all()
    assert error.sum() < 0.9 * baseline.sum()


@pytest.mark.parametrize("bits", BITS)
def test_the_error_is_that_of_rounding_to_the_steps_of_each_groups_range(bits: int) -> None:
    """Rounding to steps of s errs by s^2 / 12 in the mean; fitting may only improve on it."""
    weight = _weights("normal")
    groups = _by_group(weight)
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)

    error = (fit(weight, bits, GROUP).weight() - weight).square().mean()

    # a zero point is a whole number, which moves the range by half a step at most
    assert error < 1.05 * ((step * 2**bits / (2**bits - 0.5)).square() / 12).mean()


@pytest.mark.parametrize("bits", BITS)
def test_inputs_that_count_more_are_met_more_closely(bits: int) -> None:
    weight = _weights("heavy-tailed")
    importance = torch.logspace(-2, 2, 128)[torch.randperm(128)]

    def error(found: Tensor) -> float:
        return float((weight - found).square().sum(0) @ importance)

    alike = fit(weight, bits, GROUP)
    assert error(fit(weight, bits, GROUP, importance).weight()) < 0.9 * error(alike.weight())
    equal = fit(weight, bits, GROUP, torch.full((128,), 3.0))
    assert torch.equal(equal.weight(), alike.weight())


@pytest.mark.parametrize("bits", BITS)
def test_packed_weights_are_the_codes_weights_however_many_blocks(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = _weights("heavy-tailed").bfloat16()
    expected = fit(weight, bits, GROUP)
    monkeypatch.setattr(fitted, "_BLOCK_WEIGHTS", 32 * 128)  # two blocks of 32 rows

    packed = quantize_fitted(weight, Gptq(bits, GROUP))

    torch.testing.assert_close(packed.unpack(), expected.weight(), rtol=0, atol=0)
    assert expected.codes.min() >= 0
    assert expected.codes.max() < 2**bits


def test_groups_of_zeros_and_of_one_value_stay_what_they_are() -> None:
    weight = torch.zeros(32, 64)
    weight[:, GROUP:] = 0.25

    torch.testing.assert_close(fit(weight, 4, GROUP).weight(), weight, rtol=2e-3, atol=0)
