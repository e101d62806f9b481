"""What doctor measures of a GPU, on the stand-in: that all of it is measured, and kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from computer import Computer
from fake_cuda import CUDA, counted, fake_cuda

from specexec_cli.models.gpu_probe import (
    LAYER_OPERATIONS,
    LAYER_STARTS,
    probe_gpu,
    probe_layer,
)
from specexec_cli.planning.machine_rates import (
    PACKED_BITS,
    PROBED_ROWS,
    GpuRates,
    load_rates,
    new_rates,
    rates_file,
    save_rates,
)


def measured(triton: bool) -> GpuRates:
    with fake_cuda(triton=triton):
        return probe_gpu(CUDA, width=128, weight_bytes=1, copied_bytes=1 << 12, starts=3)


@pytest.mark.parametrize(("triton", "starts"), [(False, LAYER_OPERATIONS), (True, LAYER_STARTS)])
def test_what_the_layer_that_is_timed_starts_is_counted(triton: bool, starts: int) -> None:
    with fake_cuda(triton=triton), torch.inference_mode():
        run = probe_layer(CUDA)
        with counted() as counts:
            run()
    assert counts.operations + counts.kernels == starts


def test_everything_of_a_gpu_is_measured_and_kept(computer: Computer) -> None:
    found = measured(triton=True)
    assert found.card == "stand-in"
    assert [bits for bits, _ in found.products] == [0, *PACKED_BITS]
    for _, points in found.products:
        assert tuple(rows for rows, _ in points) == PROBED_ROWS
    assert found.kernel_s != GpuRates(card="", memory_bytes_per_s=1, tensor_flops=1).kernel_s
    save_rates(replace(new_rates(), gpu=found), rates_file())
    kept = load_rates(rates_file())
    assert kept is not None
    assert kept.gpu == found


def test_without_triton_its_kernels_start_as_assumed(computer: Computer) -> None:
    found = measured(triton=False)
    assert found.kernel_s == GpuRates(card="", memory_bytes_per_s=1, tensor_flops=1).kernel_s
