"""The compiled CPU kernels against the PyTorch reference: every format, odd shapes, any g_idx."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from packed import FORMATS, random_weight
from specexec_kernels import cpu_jit, cpu_quant, cpu_team_ir
from specexec_kernels.dequantize import dequantize_ref
from specexec_kernels.packing import PackedFormat

V1_4BIT = PackedFormat(4, stored_minus_one=True)
# a whole number of strips, one strip and a bit, less than a block of inputs, groups of odd size
SHAPES = [(256, 512, 64), (96, 224, 32), (160, 160, 160), (288, 136, 96)]


def outputs_for(fmt: PackedFormat, outputs: int) -> int:
    return -(-outputs // fmt.output_multiple) * fmt.output_multiple


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("shuffled", [False, True])
def test_dequantize_is_exact(fmt: PackedFormat, shuffled: bool) -> None:
    for inputs, outputs, group in SHAPES:
        outputs = outputs_for(fmt, outputs)
        weight = random_weight(fmt, inputs, outputs, group, shuffled=shuffled)
        assert cpu_quant.supports(weight)
        assert torch.equal(cpu_quant.dequantize(weight), dequantize_ref(weight))


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.awq or f.stored_minus_one], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 20, 40])
def test_products(fmt: PackedFormat, rows: int) -> None:
    for inputs, outputs, group in SHAPES[1:]:
        weight = random_weight(fmt, inputs, outputs_for(fmt, outputs), group, shuffled=rows == 5)
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        dense = dequantize_ref(weight).double()
        # a sum of n rounded products in any order is this close, with a constant well below n
        allowed = 4 * torch.finfo(torch.float32).eps * (x.double().abs() @ dense.abs())
        for product in (cpu_quant.matmul, cpu_quant.tiled_matmul):
            assert ((product(x, weight) - x.double() @ dense).abs() <= allowed).all(), product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scale_dtypes(dtype: torch.dtype) -> None:
    weight = random_weight(V1_4BIT, 64, 128, 32, scale_dtype=dtype)
    found, expected = cpu_quant.dequantize(weight), dequantize_ref(weight)
    # a product with a float32 scale need not be exact, and the kernel rounds at other places
    tolerance = 0.0 if dtype == torch.bfloat16 else 1e-7
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lanes", [4, 8])
def test_narrower_vector_registers(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NEON and AVX2: other tiles, other strips, the same results."""
    monkeypatch.setattr(cpu_jit, "lanes", lambda: lanes)
    for fmt in (PackedFormat(3, stored_minus_one=True), V1_4BIT, PackedFormat(4, awq=True)):
        weight = random_weight(fmt, 96, 96, 32)
        dense = dequantize_ref(weight)
        assert torch.equal(cpu_quant.dequantize(weight), dense)
        for rows in (1, 3, 17):
            x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows))
            torch.testing.assert_close(cpu_quant.matmul(x, weight), x @ dense, rtol=1e-4, atol=1e-5)


def test_threads_compile_and_run_at_once() -> None:
    weights = [random_weight(V1_4BIT, 64, 128, 32, seed=seed) for seed in range(4)]
    x = torch.randn(11, 64)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda weight: cpu_quant.matmul(x, weight), weights))
    for result, weight in zip(found, weights, strict=True):
        assert torch.equal(result, cpu_quant.matmul(x, weight))


def test_half_precision_rows_are_summed_in_float32() -> None:
    weight = random_weight(V1_4BIT, 256, 128, 64)
    x = torch.randn(3, 256).bfloat16()
    expected = x.float() @ dequantize_ref(weight)
    torch.testing.assert_close(cpu_quant.matmul(x, weight), expected, rtol=1e-5, atol=1e-5)


def test_any_thread_count_gives_the_same_bits() -> None:
    weight = random_weight(V1_4BIT, 256, 2048, 64)
    x = torch.randn(3, 256)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(cpu_quant.matmul(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_python_threads_where_there_is_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(V1_4BIT, 256, 2048, 64)
    x = torch.randn(3, 256)
    expected = cpu_quant.matmul(x, weight)
    monkeypatch.setattr(cpu_team_ir, "has_team", lambda: False)
    assert torch.equal(cpu_quant.matmul(x, weight), expected)


def test_what_is_left_to_the_reference() -> None:
    # narrower than a strip of any CPU, whose vector registers hold 4, 8 or 16 numbers
    narrow = random_weight(PackedFormat(4, awq=True), 64, 16, 32)
    assert not cpu_quant.supports(narrow)
    wide = random_weight(V1_4BIT, 64, 128, 32)
    assert cpu_quant.supports(wide)
    assert not cpu_quant.supports(replace(wide, scales=wide.scales.double()))


@pytest.mark.parametrize("fmt", [V1_4BIT, PackedFormat(3), PackedFormat(4, awq=True)], ids=str)
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_rows_bits_do_not_depend_on_the_other_rows(fmt: PackedFormat, shuffled: bool) -> None:
    weight = random_weight(fmt, 384, 160, 64, shuffled=shuffled)
    x = torch.randn(129, 384, generator=torch.Generator().manual_seed(0))
    together = cpu_quant.matmul(x, weight)
    for rows in (1, 2, 3, 4, 6, 7, 13, 20, 64):
        assert torch.equal(cpu_quant.matmul(x[-rows:], weight), together[-rows:])
