"""Products with weights of plain floats, against double precision."""

from __future__ import annotations

import itertools

import pytest
import torch
from other_cpu import other_cpu
from specexec_kernels import cpu_jit, cpu_matmul_plan
from specexec_kernels.cpu_matmul import matmul, takes_plain
from specexec_kernels.cpu_matmul_plan import chunk_rows, reads
from specexec_kernels.formats.plain import plain_weight
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = [(stored, transposed) for stored in DTYPES for transposed in (False, True)]
# Less than a register of outputs, and inputs of no whole unit; a strip and a part; several blocks,
# the last shorter, and a strip that shares outputs with the one before
SHAPES = ((1, 1), (33, 70), (32, 96), (100, 608))


def random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def product(x: Tensor, weight: Tensor, transposed: bool = False) -> Tensor:
    lying = weight.t().contiguous() if transposed else weight
    return matmul(x, plain_weight(lying, transposed=transposed))


@pytest.mark.parametrize("rows", DTYPES, ids=str)
@pytest.mark.parametrize(("stored", "transposed"), FORMS, ids=str)
def test_products(rows: torch.dtype, stored: torch.dtype, transposed: bool) -> None:
    """Weights are rounded to the rows' dtype, and nothing else is; a row's bits are its own."""
    for (outputs, inputs), counts in zip(SHAPES, ((1,), (1, 5), (1, 30), (30, 3)), strict=True):
        weight = random(outputs, inputs).to(stored)
        x = random(max(counts), inputs).to(rows)
        dense = weight.to(rows).double().t()
        # a sum of n rounded products in any order is this close, with a constant well below n
        allowed = 4 * torch.finfo(torch.float32).eps * (x.double().abs() @ dense.abs())
        together = product(x, weight, transposed)
        assert together.dtype == torch.float32
        assert ((together - x.double() @ dense).abs() <= allowed).all()
        for count in counts:
            assert torch.equal(product(x[-count:], weight, transposed), together[-count:])
        if stored != rows:
            assert torch.equal(product(x, weight.to(rows), transposed), together)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_weight_is_widened_exactly(stored: torch.dtype, transposed: bool) -> None:
    """All finite values of the dtype, subnormal ones too, come through a product with 1."""
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(stored)
    values = bits[bits.isfinite()]
    weight = torch.zeros(len(values), 32, dtype=stored)
    weight[:, 5] = values  # an upper half of a word
    x = torch.zeros(1, 32)
    x[0, 5] = 1.0
    assert torch.equal(product(x, weight, transposed)[0], values.float())


@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_as_torch_rounds(rows: torch.dtype) -> None:
    """Ties, the largest numbers, infinities and NaN too; to nearest even where bits are cut off."""
    ends = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0x477FF000])
    values = torch.cat([ends.int().view(torch.float32), random(1, 250)[0] * 100])
    x = torch.zeros(1, 32, dtype=rows)
    x[0, 0] = 1.0
    for transposed in (False, True):
        weight = torch.zeros(256, 32)
        weight[:, 0] = values
        found = product(x, weight, transposed)[0]
        torch.testing.assert_close(found, values.to(rows).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "stored"), [(torch.float32,) * 2, (torch.bfloat16,) * 2], ids=str)
def test_a_rows_bits_are_its_own(rows: torch.dtype, stored: torch.dtype) -> None:
    for transposed, inputs in ((False, 608), (True, 304)):
        weight, x = random(96, inputs).to(stored), random(129, inputs).to(rows)
        together = product(x, weight, transposed)
        for count in (1, 2, 3, 4, 5, 8, 10, 13, 14, 40, 64):
            assert torch.equal(product(x[-count:], weight, transposed), together[-count:])


@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_on_any_number_of_threads(rows: torch.dtype) -> None:
    before = torch.get_num_threads()
    weight = random(640, 512).to(torch.bfloat16)
    try:
        for count, transposed in itertools.product((1, 20, 200), (False, True)):
            x, found = random(count, 512).to(rows), []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(product(x, weight, transposed))
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(before)


def test_rows_may_be_a_view_that_is_not_contiguous_and_none() -> None:
    weight, x = random(32, 64).bfloat16(), random(64, 5).t()
    assert torch.equal(product(x, weight), product(x.contiguous(), weight))
    assert product(x[:0], weight).shape == (0, 32)


def test_more_rows_than_a_cache_has_sums_for() -> None:
    """Tiles keep the sums of 512 rows at a time, of several strips that share a panel's inputs."""
    weight, x = random(320, 576).bfloat16(), random(1100, 576).bfloat16()
    for transposed in (False, True):
        together = product(x, weight, transposed)
        for some in (slice(0, 1), slice(511, 513), slice(480, 580), slice(1024, 1100)):
            assert torch.equal(product(x[some], weight, transposed), together[some])


def test_what_is_kept_of_plans_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul_plan, "_MOST_PLANS", 3)
    monkeypatch.setattr(cpu_matmul_plan, "_plans", {})
    x, weight = random(8, 64), random(32, 64)
    for rows in range(1, 9):
        assert torch.equal(product(x[:rows], weight), product(x, weight)[:rows])
        assert len(cpu_matmul_plan._plans) <= 3


def test_what_kernels_read() -> None:
    lanes = cpu_jit.lanes()
    assert reads(plain_weight(torch.zeros(lanes, 32)))
    assert not reads(plain_weight(torch.zeros(lanes, 34)))
    assert not reads(plain_weight(torch.zeros(lanes - 1, 32)))
    assert not reads(plain_weight(torch.zeros(lanes, 32, dtype=torch.float64)))
    assert reads(plain_weight(torch.zeros(4, lanes), transposed=True))
    assert not reads(plain_weight(torch.zeros(6, lanes), transposed=True))


def test_what_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, pairs in itertools.product((True, False), repeat=2):
        other_cpu(monkeypatch, matmul=there, dot=pairs)
        assert takes_plain(torch.float32)
        assert takes_plain(torch.bfloat16)
        assert takes_plain(torch.float16) == (not there)
    assert not takes_plain(torch.float64)


def test_chunks_waste_few_rows() -> None:
    for rows in range(1, 700):
        size = chunk_rows(rows)
        assert -(-rows // size) * size - rows <= max(3, rows // 5)
