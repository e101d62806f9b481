"""Packed weights in Triton against each format's definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import random_blocks
from random_weights import FORMATS, random_weight
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gguf import GGUF_FORMATS

INPUTS = 256
GGUF = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
PRODUCTS = (
    "fp8-block", "mxfp4", "nvfp4", "int4-zeros", "nf4", "Q4_K", "gptq-4-shuffled", "awq"
)  # fmt: skip


def weight(name: str, outputs: int = 40, inputs: int = INPUTS) -> PackedWeight:
    """40 outputs are a block of the product's 32 and a part of one."""
    if name in GGUF_FORMATS:
        fmt = GGUF_FORMATS[name]
        columns = fmt.parts[0].shape(outputs, inputs)[1]
        blocks = torch.from_numpy(random_blocks(Kind[name], outputs * columns, seed=0))
        return PackedWeight(fmt, inputs, outputs, {"weight": blocks.view(outputs, columns)})
    return random_weight(FORMATS[name], outputs, inputs)


def on_device(packed: PackedWeight, device: torch.device) -> PackedWeight:
    return replace(packed, tensors={leaf: t.to(device) for leaf, t in packed.tensors.items()})


@pytest.mark.parametrize("name", [*FORMATS, *GGUF])
def test_unpacking_is_exact(name: str, device: torch.device) -> None:
    from specexec_kernels import triton_rows

    packed = weight(name, 20)
    found = triton_rows.unpack(on_device(packed, device), torch.float32)
    assert torch.equal(found.cpu(), packed.unpack())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "inputs"), [("awq", 256), ("Q4_0", 256), ("Q8_0", 256), ("Q6_K", 2048)]
)
def test_a_weight_that_stays_has_the_same_numbers_and_products(
    name: str, inputs: int, dtype: torch.dtype, device: torch.device, matrix_units: None
) -> None:
    """Whatever the steps in which the kernels of both forms go through the inputs."""
    from specexec_kernels import triton_rows

    packed = on_device(weight(name, inputs=inputs), device)
    staying = packed.format.staying(inputs)
    assert staying is not None
    stays = replace(packed, format=staying, tensors=packed.format.rearrange(packed.matrices()))
    sizes = [
        sum(tensor.numel() * tensor.element_size() for tensor in each.tensors.values())
        for each in (packed, stays)
    ]
    assert sizes[0] == sizes[1]
    assert torch.equal(stays.unpack(), packed.unpack())
    assert torch.equal(triton_rows.unpack(stays, dtype), triton_rows.unpack(packed, dtype))
    rows = torch.randn(17, inputs, generator=torch.Generator().manual_seed(0))
    for count in (1, 17):
        x = rows[:count].to(device, dtype)
        expected = triton_rows.quantized_matmul(x, packed, torch.float32)
        assert torch.equal(triton_rows.quantized_matmul(x, stays, torch.float32), expected)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_every_float8_is_read_as_torch_reads_it(kind: str, device: torch.device) -> None:
    from specexec_kernels import triton_rows

    dtype = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}[kind]
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(dtype)
    fmt = replace(FORMATS["fp8-tensor"], kind=kind)
    stored = {"weight": codes, "weight_scale": torch.ones(1)}
    packed = on_device(PackedWeight(fmt, 16, 16, stored), device)
    with np.errstate(invalid="ignore"):  # numpy, which the interpreter takes, warns of NaN
        found = triton_rows.unpack(packed, torch.float32)
    torch.testing.assert_close(found.cpu(), codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("rows", [1, 17])
def test_products(name: str, rows: int, device: torch.device) -> None:
    from specexec_kernels import triton_rows

    packed = weight(name)
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(rows))
    dense = packed.unpack().double().T
    found = triton_rows.quantized_matmul(x.to(device), on_device(packed, device)).cpu()
    allowed = 4 * torch.finfo(torch.float32).eps * (x.double().abs() @ dense.abs())
    assert ((found - x.double() @ dense).abs() <= allowed).all()


@pytest.mark.parametrize("name", ["mxfp4", "gptq-4", "awq"])
def test_sums_may_be_kept_in_float32(name: str, device: torch.device) -> None:
    from specexec_kernels import triton_rows

    packed = on_device(weight(name), device)
    x = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(0)).half().to(device)
    found = triton_rows.quantized_matmul(x, packed, torch.float32)
    assert found.dtype == torch.float32
    dense = triton_rows.unpack(packed, torch.float16).double().T
    # a sum of n exact products in any order is this close, with a constant well below n
    allowed = 4 * torch.finfo(torch.float32).eps * (x.double().abs() @ dense.abs())
    assert ((found.double() - x.double() @ dense).abs() <= allowed).all()
    assert triton_rows.quantized_matmul(x, packed).dtype == torch.float16


@pytest.mark.parametrize("name", ["gptq-4", "Q4_K"])
def test_a_row_has_the_same_bits_among_any_number_of_others(
    name: str, device: torch.device, matrix_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With inputs that are cut, and where so many rows come that the weight is unpacked first."""
    from specexec_kernels import triton_rows

    monkeypatch.setattr(triton_rows, "LEAST_INPUTS", INPUTS // 2)
    assert triton_rows.cuts_of(40, INPUTS) == 2
    packed = on_device(weight(name), device)
    x = torch.randn(600, INPUTS, generator=torch.Generator().manual_seed(0)).half().to(device)
    # in float32, which no rounding to two bytes makes alike
    many = x[: triton_rows.UNPACKED_ROWS + 1]
    together = triton_rows.quantized_matmul(many, packed, torch.float32)
    for first, last in ((0, 1), (3, 20), (7, 40), (1, 100), (9, 138)):
        found = triton_rows.quantized_matmul(x[first:last], packed, torch.float32)
        assert torch.equal(found, together[first:last]), (first, last)
