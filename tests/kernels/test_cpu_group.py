"""Many products in one launch: the bits of each alone, whatever the others are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed import V1_4BIT, random_weight
from row_packed import FORMATS
from row_packed import random_weight as random_row_weight
from specexec_kernels import cpu_group, cpu_jit, cpu_linear, cpu_products, cpu_team, dispatch
from specexec_kernels.cpu_group import Group
from specexec_kernels.cpu_half import Transposed
from specexec_kernels.cpu_products import products
from specexec_kernels.formats.awq import Awq
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from torch import Tensor

Weight = Tensor | Transposed | PackedWeight
ROW_PACKED = ("mxfp4", "int4-zeros", "fp8-block")  # without offsets, with them, blocks of outputs
DOWN = {"gptq": V1_4BIT, "gptq-shuffled": Gptq(4, 0, shuffled=True), "awq": Awq(0)}
KINDS = ("bfloat16", "float16", "float32", "transposed", *DOWN, *ROW_PACKED)
ROWS, INPUTS, OUTPUTS = 30, 128, 288


def weight(kind: str, seed: int) -> Weight:
    torch.manual_seed(seed)
    if kind in DOWN:
        return random_weight(DOWN[kind], INPUTS, OUTPUTS, 32)
    if kind in ROW_PACKED:
        return random_row_weight(FORMATS[kind], OUTPUTS, INPUTS, seed)
    if kind == "transposed":
        return Transposed(torch.randn(INPUTS, OUTPUTS).bfloat16())
    return torch.randn(OUTPUTS, INPUTS).to(getattr(torch, kind))


def alone(rows: Tensor, weight: Weight) -> Tensor:
    if isinstance(weight, PackedWeight):
        return dispatch.quantized_matmul(rows, weight)
    if isinstance(weight, Transposed):
        return cpu_linear.transposed_product(rows, weight.stored).to(rows.dtype)
    return cpu_linear.product(rows, weight).to(rows.dtype)


takes = st.lists(
    st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=40), min_size=1, max_size=6
)


# rows that a kernel computes for nobody make up for those that another kernel computes
@example(kind="gptq", dtype=torch.float32, takes=[[0, 1, 2], [3]], each=2, threads=1)
@example(kind="bfloat16", dtype=torch.bfloat16, takes=[[0, 1, 2], [3]], each=1, threads=1)
@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    takes=takes,
    each=st.integers(1, 3),
    threads=st.integers(1, 3),
)
def test_each_product_is_as_if_alone(
    kind: str, dtype: torch.dtype, takes: list[list[int]], each: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weights = [[weight(kind, 10 * n + i) for i in range(each)] for n in range(len(takes))]
        rows = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(0)).to(dtype)
        groups = [Group(group) for group in weights]
        form = cpu_group.form_for(rows, groups)
        rounded = kind in ("float16", "float32") and dtype == torch.bfloat16
        if rounded:  # before it is multiplied, by models/linear.py and one by one
            assert form is None
            return
        if form is None:  # PyTorch multiplies where the CPU has instructions that kernels lack
            assert kind in ("bfloat16", "transposed")
            assert not cpu_jit.has_dot()
            return
        found = products(form, rows, takes, [group.weights for group in groups])
        assert found.shape == (each, sum(map(len, takes)), OUTPUTS)
        first = 0
        for take, group in zip(takes, weights, strict=True):
            for n, one in enumerate(group):
                ours = found[n, first : first + len(take)].to(dtype)
                assert torch.equal(ours, alone(rows[take], one))
            first += len(take)
    finally:
        torch.set_num_threads(before)


def test_weights_that_no_kernel_takes_together() -> None:
    rows = torch.randn(2, INPUTS)
    plain, packed = weight("float32", 0), weight("gptq", 0)
    assert isinstance(packed, PackedWeight)

    def taken(*groups: list[Weight]) -> bool:
        return cpu_group.form_for(rows, [Group(group) for group in groups]) is not None

    assert taken([plain, plain], [plain, plain])
    assert not taken([plain, packed])
    assert not taken([plain], [weight("float16", 0)])
    assert not taken([packed], [random_weight(V1_4BIT, INPUTS, OUTPUTS, 64)])
    assert not taken([weight("mxfp4", 0)], [weight("int4-zeros", 0)])
    assert not taken([plain[:-1]]), "no whole strips"
    assert not taken([torch.randn(INPUTS, OUTPUTS).t()]), "not as rows lie in memory"
    assert cpu_group.form_for(rows.to("meta"), [Group([plain])]) is None


@pytest.mark.parametrize("kind", ["bfloat16", "gptq", "mxfp4"])
def test_one_launch_for_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    run = cpu_team.run
    monkeypatch.setattr(cpu_team, "run", lambda *call: (launches.append(call), run(*call)))
    weights = [[weight(kind, n), weight(kind, 9 - n)] for n in range(4)]
    rows = torch.randn(ROWS, INPUTS)
    groups = [Group(group) for group in weights]
    form = cpu_group.form_for(rows, groups)
    assert form is not None
    products(form, rows, [[0], [1, 2], list(range(9)), [5]], [group.weights for group in groups])
    # others only put rows in order
    assert [call[0] for call in launches].count(cpu_products._each_kernel()) == 1
    assert launches[-1][0] is cpu_products._each_kernel()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 96), (132, 64), (300, 32), (31, 45)])
def test_transposed_weights(stored: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    lying = torch.randn(shape).to(stored)
    rows = torch.randn(15, shape[0])
    exact = rows.double() @ lying.double()
    allowed = 1e-6 * shape[0] ** 0.5 * (rows.double().abs() @ lying.double().abs())
    together = cpu_linear.transposed_product(rows, lying)
    assert ((together - exact).abs() <= allowed).all()
    for count in (1, 2, 7):
        assert torch.equal(cpu_linear.transposed_product(rows[:count], lying), together[:count])


def test_what_is_kept_of_calls_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "_MOST_CALLS", 3)
    cpu_products._calls.clear()
    x, stored = torch.randn(8, INPUTS), weight("float32", 1)
    for rows in range(1, 9):
        assert torch.equal(alone(x[:rows], stored), alone(x, stored)[:rows])
        assert len(cpu_products._calls) <= 3
