"""Packed weights: the compiled kernels against each format's definition."""

from __future__ import annotations

import pytest
import torch
from random_weights import FORMATS, random_weight
from specexec_kernels import cpu_jit
from specexec_kernels.cpu_matmul import matmul
from specexec_kernels.formats import base
from torch import Tensor

OUTPUTS, INPUTS = 84, 256  # outputs: five registers of 16 and a part of one
COMPUTE = [torch.float32, *([torch.bfloat16] if cpu_jit.has_dot() else [])]
# What a format emits is the same in kernels of one row and of several, which take a second each to
# compile: those of two and of four rows are tried for formats that each emit something of its own.
IN_EVERY_SHAPE = ("fp8-block", "mxfp4", "nvfp4", "int4-zeros", "int4-shuffled", "int8-zeros",
                  "nf4-nested", "gptq-4", "gptq-4-shuffled", "awq")  # fmt: skip


def rows(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(40, INPUTS, generator=torch.Generator().manual_seed(3))[:count].to(dtype)


@pytest.mark.parametrize("dtype", COMPUTE, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_product_is_that_of_the_unpacked_weight(name: str, dtype: torch.dtype) -> None:
    weight = random_weight(FORMATS[name], OUTPUTS, INPUTS)
    x = rows(40, dtype)
    dense = weight.unpack().double()
    expected = x.double() @ dense.T
    # what rounding each weight to bfloat16 (8 bits) or each product to float32 (24) can add up to;
    # by the largest weight, since codes and zero points are multiplied apart
    bits = 24 if dtype == torch.float32 else 8
    bound = x.double().abs().sum(1, keepdim=True) * dense.abs().max() * 2.0**-bits * 4
    counts = (1, 2, 3, 17, 40) if name in IN_EVERY_SHAPE else (1, 17, 40)
    found = {count: matmul(x[:count], weight) for count in counts}
    for count, product in found.items():
        assert ((product.double() - expected[:count]).abs() <= bound[:count]).all()
        # a row's bits are its own
        assert torch.equal(product[0], found[1][0])
        assert torch.equal(product, found[40][:count])


@pytest.mark.parametrize("name", FORMATS)
def test_last_inputs_that_fill_no_block(name: str) -> None:
    """192 inputs are a block and a half where no scale says how long blocks are."""
    weight = random_weight(FORMATS[name], 16, 192)
    if name == "fp8-block":
        assert weight.tensors["weight_scale_inv"].shape == (1, 2)
    x = rows(1, torch.float32)[:, :192].contiguous()
    expected = x.double() @ weight.unpack().double().T
    torch.testing.assert_close(
        matmul(x, weight).double(), expected, rtol=0,
        atol=1e-5 * float(expected.abs().max()),
    )  # fmt: skip


@pytest.mark.skipif(not cpu_jit.has_dot(), reason="no instruction for pairs of bfloat16")
@pytest.mark.parametrize("name", ["int4-zeros", "int8-zeros", "nvfp4", "mxfp4", "gptq-4", "awq"])
def test_many_rows_of_pairs(name: str) -> None:
    """In tiles wide strips, chunks of 32 rows and further groups of chunks begin one by one."""
    for inputs in (192, 512):
        weight = random_weight(FORMATS[name], OUTPUTS, inputs)
        x = torch.randn(700, inputs, generator=torch.Generator().manual_seed(4)).bfloat16()
        dense = weight.unpack().double()
        together = matmul(x, weight)
        bound = x.double().abs().sum(1, keepdim=True) * dense.abs().max() * 2.0**-8 * 4
        assert ((together.double() - x.double() @ dense.T).abs() <= bound).all()
        for some in (slice(0, 1), slice(100, 180), slice(500, 600), slice(10, 250)):
            assert torch.equal(matmul(x[some], weight), together[some])


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit(threads: int) -> None:
    before = torch.get_num_threads()
    weight, x = random_weight(FORMATS["mxfp4"], 200, INPUTS), rows(20, torch.float32)
    expected = matmul(x, weight)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(matmul(x, weight), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("dtype", COMPUTE, ids=str)
def test_every_float8_is_read_as_torch_reads_it(kind: str, dtype: torch.dtype) -> None:
    """Subnormal numbers, infinities and NaN too: each code is picked out by a row of its own."""
    from dataclasses import replace

    from specexec_kernels.formats.base import PackedWeight

    fmt = replace(FORMATS["fp8-tensor"], kind=kind)
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, {
        "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}[kind]))  # fmt: skip
    expected = codes.float()
    stored = {"weight": torch.zeros(256, 16).to(codes.dtype), "weight_scale": torch.ones(1)}
    stored["weight"].view(torch.uint8)[:, 0] = torch.arange(256, dtype=torch.uint8)
    x = torch.zeros(1, 16, dtype=dtype)
    x[0, 0] = 1.0
    found = matmul(x, PackedWeight(fmt, 16, 256, stored))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_some_outputs_at_a_time_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; 200 outputs are not whole runs of what is unpacked together."""
    weight = random_weight(FORMATS[name], 200, INPUTS)
    whole = weight.unpack().to(torch.float16)
    monkeypatch.setattr(base, "_AT_ONCE", 32 * INPUTS)
    assert torch.equal(weight.unpack_to(torch.float16), whole)
