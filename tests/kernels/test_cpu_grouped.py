"""Many products in one launch: the bits of each alone, whatever the others are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_weights import FORMATS, V1_4BIT, down_weight, random_weight
from specexec_kernels import cpu_grouped, cpu_jit, cpu_team
from specexec_kernels.cpu_grouped import Group, products, takes_together
from specexec_kernels.cpu_matmul import matmul
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.plain import plain_weight

PLAIN = ("bfloat16", "float16", "float32", "transposed")
# without offsets, with them, blocks of outputs; and codes that go down the inputs
PACKED = ("mxfp4", "int4-zeros", "fp8-block", "gptq-4", "gptq-4-shuffled", "awq")
ROWS, INPUTS, OUTPUTS = 30, 128, 288


def weight(kind: str, seed: int) -> PackedWeight:
    torch.manual_seed(seed)
    if kind in PACKED:
        return random_weight(FORMATS[kind], OUTPUTS, INPUTS, seed)
    if kind == "transposed":
        return plain_weight(torch.randn(INPUTS, OUTPUTS).bfloat16(), transposed=True)
    return plain_weight(torch.randn(OUTPUTS, INPUTS).to(getattr(torch, kind)))


takes = st.lists(
    st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=40), min_size=1, max_size=6
)


# rows that a kernel computes for nobody make up for those that another kernel computes
@example(kind="gptq-4", dtype=torch.float32, takes=[[0, 1, 2], [3]], each=2, threads=1)
@example(kind="bfloat16", dtype=torch.bfloat16, takes=[[0, 1, 2], [3]], each=1, threads=1)
@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(PLAIN + PACKED),
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
        if not takes_together(rows, groups):
            # PyTorch multiplies where the CPU has instructions that kernels lack
            assert kind in PLAIN
            assert not cpu_jit.has_dot()
            return
        found = products(rows, takes, [group.weights for group in groups])
        assert found.shape == (each, sum(map(len, takes)), OUTPUTS)
        first = 0
        for take, group in zip(takes, weights, strict=True):
            for n, one in enumerate(group):
                alone = matmul(rows[take], one)
                assert torch.equal(found[n, first : first + len(take)], alone)
            first += len(take)
    finally:
        torch.set_num_threads(before)


def test_weights_that_no_kernel_takes_together() -> None:
    rows = torch.randn(2, INPUTS)
    plain, packed = weight("float32", 0), weight("gptq-4", 0)

    def taken(*groups: list[PackedWeight]) -> bool:
        return takes_together(rows, [Group(group) for group in groups])

    assert taken([plain, plain], [plain, plain])
    assert taken([plain, packed])
    assert not taken([plain, packed], [packed, plain])
    assert not taken([plain], [weight("float16", 0)])
    assert not taken([packed], [down_weight(V1_4BIT, INPUTS, OUTPUTS, 64)])
    assert not taken([weight("mxfp4", 0)], [weight("int4-zeros", 0)])
    assert not taken([plain_weight(torch.randn(OUTPUTS, 34))]), "no whole units"
    assert not taken([plain_weight(torch.randn(INPUTS, OUTPUTS).t())]), "not as rows lie in memory"
    assert not takes_together(rows.to("meta"), [Group([plain])])


@pytest.mark.parametrize("kind", ["bfloat16", "gptq-4", "mxfp4"])
def test_one_launch_for_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    run = cpu_team.run
    monkeypatch.setattr(cpu_team, "run", lambda *call: (launches.append(call), run(*call)))
    groups = [Group([weight(kind, n), weight(kind, 9 - n)]) for n in range(4)]
    takes = [[0], [1, 2], list(range(9)), [5]]
    products(torch.randn(ROWS, INPUTS), takes, [group.weights for group in groups])
    # others only put rows in order
    assert [call[0] for call in launches].count(cpu_grouped.each_kernel()) == 1
    assert launches[-1][0] is cpu_grouped.each_kernel()
