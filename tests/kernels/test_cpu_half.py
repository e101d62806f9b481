"""Products with weights stored in two or four bytes, against double precision."""

from __future__ import annotations

import pytest
import torch
from specexec_kernels import cpu_half, cpu_jit

LANES = cpu_jit.lanes()
# one strip and one pair of vectors of inputs; less than a block; several blocks, the last shorter
SHAPES = [(2 * LANES, 2 * LANES), (6 * LANES, 96), (4 * LANES, 416)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 13, 14, 65])
def test_products(dtype: torch.dtype, rows: int) -> None:
    for outputs, inputs in SHAPES:
        generator = torch.Generator().manual_seed(rows)
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        x = torch.randn(rows, inputs, generator=generator)
        exact = x.double() @ weight.double().t()
        # a sum of n rounded products in any order is this close, with a constant well below n
        allowed = (
            4 * torch.finfo(torch.float32).eps * (x.double().abs() @ weight.double().abs().t())
        )
        assert ((cpu_half.matmul(x, weight) - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_weight_is_widened_exactly(dtype: torch.dtype) -> None:
    """All finite values of the dtype, subnormal ones too, come through a product with 1."""
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    values = bits[bits.isfinite()]
    width = 2 * LANES
    weight = torch.zeros(-(-len(values) // width) * width, width, dtype=dtype)
    column = 5  # an upper half of a word
    weight[: len(values), column] = values
    x = torch.zeros(1, width)
    x[0, column] = 1.0
    assert torch.equal(cpu_half.matmul(x, weight)[0, : len(values)], values.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rows_bits_do_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4 * LANES, 320, generator=generator).to(dtype)
    x = torch.randn(129, 320, generator=generator)
    together = cpu_half.matmul(x, weight)
    for rows in (1, 2, 4, 8, 10, 13, 40):
        assert torch.equal(cpu_half.matmul(x[-rows:], weight), together[-rows:])


def test_same_bits_on_any_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20 * LANES, 128, generator=generator).bfloat16()
    x = torch.randn(5, 128, generator=generator)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cpu_half.matmul(x, weight)
        torch.set_num_threads(3)
        assert torch.equal(cpu_half.matmul(x, weight), alone)
    finally:
        torch.set_num_threads(threads)


def test_rows_may_be_a_view_that_is_not_contiguous() -> None:
    weight = torch.randn(2 * LANES, 64).bfloat16()
    x = torch.randn(64, 4).t()
    assert torch.equal(cpu_half.matmul(x, weight), cpu_half.matmul(x.contiguous(), weight))


def test_what_is_not_read() -> None:
    fits = torch.zeros(2 * LANES, 2 * LANES, dtype=torch.bfloat16)
    assert cpu_half.reads(fits)
    assert not cpu_half.reads(fits.double())
    assert not cpu_half.reads(fits[:, ::2])
    assert not cpu_half.reads(fits.to("meta"))


def test_chunks_waste_few_rows() -> None:
    for rows in range(1, 700):
        size = cpu_half.chunk_rows(rows)
        assert -(-rows // size) * size - rows <= max(3, rows // 5)
