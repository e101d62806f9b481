"""Weights whose codes go down the inputs, as GPTQ and AWQ store them: what others do not have.

Products of each format are tested beside all others in test_formats.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from other_cpu import other_cpu
from random_weights import DOWN, V1_4BIT, down_weight
from specexec_kernels import cpu_jit, cpu_team_ir
from specexec_kernels.cpu_matmul import matmul
from specexec_kernels.cpu_matmul_ir import build_matmul
from specexec_kernels.cpu_matmul_plan import reads
from specexec_kernels.cpu_matmul_spec import MatmulSpec
from specexec_kernels.formats.awq import Awq
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from torch import Tensor

needs_dot = pytest.mark.skipif(not cpu_jit.has_dot(), reason="no instruction for pairs of bfloat16")
COMPUTE = [torch.float32, *([torch.bfloat16] if cpu_jit.has_dot() else [])]
# (inputs, outputs, inputs of a group), and rows: a whole number of strips, less than a block of
# inputs, one group, groups of odd size, a group larger than the inputs
CASES = [((256, 512, 64), (1, 5, 20)), ((96, 224, 32), (1,)), ((160, 160, 160), (20,)),
         ((288, 136, 96), (1, 20)), ((64, 160, 128), (20,))]  # fmt: skip


def rows_of(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(inputs))


def allowed(x: Tensor, dense: Tensor) -> Tensor:
    """A sum of n rounded products in any order is this close, with a constant well below n."""
    return 4 * torch.finfo(torch.float32).eps * (x.double().abs() @ dense.abs())


def bound_of(weight: PackedWeight, x: Tensor, dense: Tensor) -> Tensor:
    """`allowed`, unless each weight is rounded to bfloat16, as with an index."""
    if x.dtype == torch.float32 or not weight.format.index:
        return allowed(x, dense)
    return 2.0**-8 * (x.double().abs() @ dense.abs())


@pytest.mark.parametrize("fmt", DOWN, ids=str)
@pytest.mark.parametrize("dtype", COMPUTE, ids=str)
def test_products(fmt: Gptq | Awq, dtype: torch.dtype) -> None:
    # blocks of 8 inputs, which fill no line of pairs in the end, so that no tiles are taken
    odd = [((200, 136, 40), (1, 20))] if fmt.unit <= 8 else []
    for (inputs, outputs, group), counts in CASES + odd:
        weight = down_weight(fmt, inputs, outputs, group)
        assert reads(weight)
        dense = weight.unpack().T.double()
        for rows in counts:
            x = rows_of(rows, inputs).to(dtype)
            error = (matmul(x, weight) - x.double() @ dense).abs()
            assert (error <= bound_of(weight, x, dense)).all()


@pytest.mark.parametrize("fmt", DOWN, ids=str)
@pytest.mark.parametrize("dtype", COMPUTE, ids=str)
def test_every_code_and_zero_point_is_exact(fmt: Gptq | Awq, dtype: torch.dtype) -> None:
    """A product with 1 gives each weight; with an index as the rows' dtype has it."""
    weight = down_weight(fmt, 256, 256, 32)
    exact = weight.unpack().T
    if weight.format.index:
        exact = exact.to(dtype).float()
    for first in range(0, 256, 64):
        x = torch.eye(256)[first : first + 64].to(dtype)
        assert torch.equal(matmul(x, weight), exact[first : first + 64])
        assert torch.equal(matmul(x[:1], weight), exact[first : first + 1])


@needs_dot
@pytest.mark.parametrize("n_groups", [1, 8])
def test_zero_points_in_the_middle_of_the_codes(n_groups: int) -> None:
    """Of one group or of all: blocks without offsets have a shorter way in tiles."""
    weight = down_weight(Gptq(4, 0), 256, 256, 32)
    weight.tensors["qzeros"][:n_groups] = 0x88888888 - (1 << 32)
    dense, x = weight.unpack().T.double(), rows_of(40, 256).bfloat16()
    together = matmul(x, weight)
    assert ((together - x.double() @ dense).abs() <= allowed(x, dense)).all()
    assert torch.equal(matmul(x[:1], weight), together[:1])


@pytest.mark.parametrize("fmt", [V1_4BIT, Gptq(4, 0, shuffled=True), Awq(0)], ids=str)
@pytest.mark.parametrize("dtype", COMPUTE, ids=str)
def test_more_outputs_than_a_claim_has(fmt: Gptq | Awq, dtype: torch.dtype) -> None:
    """And any number of threads, which share them otherwise."""
    weight = down_weight(fmt, 192, 8192 + 2080, 64)
    x = rows_of(600, 192).to(dtype)
    dense, before = weight.unpack().T.double(), torch.get_num_threads()
    together = matmul(x, weight)
    assert ((together - x.double() @ dense).abs() <= bound_of(weight, x, dense)).all()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for some in (slice(0, 1), slice(7, 9), slice(500, 530)):
                assert torch.equal(matmul(x[some], weight), together[some])
    finally:
        torch.set_num_threads(before)


def test_narrower_vector_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NEON: other tiles, other strips, the same results. test_cpu_forms tries AVX2."""
    other_cpu(monkeypatch, lanes=4)
    for fmt in DOWN:
        # the last strip of 4-bit and 8-bit codes shares outputs with the one before it
        weight = down_weight(fmt, 96, 104 if fmt.unit <= 8 else 96, 32)
        for rows in (3, 17):
            x = rows_of(rows, 96)
            exact, found = x @ weight.unpack().T, matmul(x, weight)
            torch.testing.assert_close(
                found, exact, rtol=1e-4, atol=1e-6 * float(exact.abs().max())
            )


def test_threads_compile_and_run_at_once() -> None:
    weights = [down_weight(V1_4BIT, 64, 128, 32, seed=seed) for seed in range(4)]
    x = torch.randn(11, 64)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda weight: matmul(x, weight), weights))
    for result, weight in zip(found, weights, strict=True):
        assert torch.equal(result, matmul(x, weight))


def test_python_threads_where_there_is_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = down_weight(V1_4BIT, 256, 2048, 64)
    x = torch.randn(3, 256)
    expected = matmul(x, weight)
    monkeypatch.setattr(cpu_team_ir, "has_team", lambda: False)
    assert torch.equal(matmul(x, weight), expected)


def test_rows_may_be_a_view_that_is_not_contiguous_and_none() -> None:
    weight, x = down_weight(V1_4BIT, 64, 128, 32), rows_of(64, 5).t()
    assert torch.equal(matmul(x, weight), matmul(x.contiguous(), weight))
    assert matmul(x[:0], weight).shape == (0, 128)


@pytest.mark.parametrize("shuffled", [False, True])
def test_groups_that_end_inside_a_word_are_left_to_the_definition(shuffled: bool) -> None:
    fmt = Gptq(4, 0, shuffled=shuffled)
    weight, x = down_weight(fmt, 96, 64, 12), rows_of(5, 96)
    assert not reads(weight)
    torch.testing.assert_close(matmul(x, weight), x @ weight.unpack().T)


@pytest.mark.parametrize(("fmt", "group"), [(Gptq(3, 0), 16), (Gptq(2, 0), 8), (Gptq(4, 0), 4)])
@pytest.mark.parametrize("dtype", COMPUTE, ids=str)
def test_several_groups_in_a_word(fmt: Gptq, group: int, dtype: torch.dtype) -> None:
    weight, x = down_weight(fmt, 96, 160, group), rows_of(20, 96).to(dtype)
    assert reads(weight)
    dense, together = weight.unpack().T.double(), matmul(x, weight)
    assert ((together - x.double() @ dense).abs() <= bound_of(weight, x, dense)).all()
    assert torch.equal(matmul(x[:1], weight), together[:1])


def test_lines_that_come_next_are_asked_for_where_they_begin() -> None:
    """AWQ's are shared by the vectors of outputs of a strip, each of which looks for itself."""
    text = build_matmul(MatmulSpec(Awq(64), False, 1, 4, cpu_jit.lanes(), "few"), "kernel")
    looks = re.findall(r"urem i64 %\"?([^\s\",]+)\"?, 128", text)
    assert len(set(looks)) == 4


def test_an_index_of_groups_in_order_changes_little() -> None:
    plain = down_weight(V1_4BIT, 256, 128, 64)
    index = torch.arange(256, dtype=torch.int32) // 64
    fmt = replace(plain.format, shuffled=True)
    indexed = PackedWeight(fmt, 256, 128, {**plain.tensors, "g_idx": index})
    assert torch.equal(indexed.unpack(), plain.unpack())
    x, dense = rows_of(3, 256), plain.unpack().T.double()
    assert ((matmul(x, indexed) - matmul(x, plain)).abs() <= 2 * allowed(x, dense)).all()
