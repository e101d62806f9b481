"""Rows of bfloat16 times packed integers, on CPUs without instructions for bfloat16."""

from __future__ import annotations

import pytest
import torch
from other_cpu import other_cpu
from random_weights import FORMATS, any_weight
from specexec_kernels import cpu_jit
from specexec_kernels.cpu_matmul import matmul
from specexec_kernels.cpu_matmul_plan import multiplies_integers, plan_for
from specexec_kernels.cpu_matmul_spec import TERMS_OF_WHOLE, X_STEP, X_SUMS
from specexec_kernels.formats.base import PackedFormat, PackedWeight
from specexec_kernels.formats.gguf import GGUF_FORMATS
from torch import Tensor

pytestmark = pytest.mark.skipif(not cpu_jit.has_int16(), reason="no products of int16")
ALL: dict[str, PackedFormat] = {**FORMATS, **GGUF_FORMATS}
INTEGERS = [name for name, fmt in ALL.items() if fmt.zero is not None and not fmt.index
            and fmt.block & (fmt.block - 1) == 0]  # fmt: skip
IN_EVERY_SHAPE = ("Q4_0", "Q4_K", "int8-zeros", "awq")


def rows(count: int, inputs: int, largest: int = 127) -> Tensor:
    """Whole numbers, which need not be rounded to be multiples of a block's step."""
    rng = torch.Generator().manual_seed(1)
    return torch.randint(-largest, largest + 1, (count, inputs), generator=rng).bfloat16()


def check(x: Tensor, packed: PackedWeight, error: float) -> Tensor:
    """The products, each within `error` of the largest input times the sum of weights."""
    dense = packed.unpack().double()
    found, largest = matmul(x, packed), x.double().abs().max()
    # weights are sums of a scaled code and an offset, which may be larger than they are
    bound = error * largest * torch.clamp(dense.abs().sum(1), min=dense.abs().max() * 4)
    assert ((found.double() - x.double() @ dense.T).abs() <= bound).all()
    return found


@pytest.mark.parametrize(
    ("name", "lanes"),
    [*((name, 8) for name in INTEGERS),
     *((name, 16) for name in ("Q4_0", "awq") if cpu_jit.lanes() == 16)],
)  # fmt: skip
def test_whole_numbers_are_multiplied_exactly(
    name: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_cpu(monkeypatch, lanes=lanes, matmul=False, dot=False)
    packed = any_weight(name, 52, 256)
    assert multiplies_integers(torch.bfloat16, packed.format)
    assert not multiplies_integers(torch.float32, packed.format)
    x = rows(19, 256)
    together = check(x, packed, 2.0**-22)
    for count in (1, 4) if name in IN_EVERY_SHAPE else (1,):
        assert torch.equal(matmul(x[:count], packed), together[:count])


@pytest.mark.parametrize("name", IN_EVERY_SHAPE)
def test_a_rows_bits_are_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other_cpu(monkeypatch, lanes=8, matmul=False, dot=False)
    packed, before = any_weight(name, 200, 512), torch.get_num_threads()
    x = torch.randn(129, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    # what is below 1/128 of a block's largest is rounded to 1/32768 of it
    together = check(x, packed, 2.0**-15)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for some in (slice(0, 1), slice(5, 6), slice(3, 7), slice(40, 57), slice(0, 129)):
                assert torch.equal(matmul(x[some], packed), together[some])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["int4-zeros-128", "gptq-4", "int8-zeros-channel"])
def test_last_inputs_that_fill_no_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other_cpu(monkeypatch, lanes=8, matmul=False, dot=False)
    inputs = 192 if name != "int4-zeros-128" else 256
    check(rows(3, inputs), any_weight(name, 16, inputs), 2.0**-22)


def test_no_scale_of_a_block_of_zeros_becomes_denormal(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs take a hundred cycles for a denormal number: a third of a token of sparse rows."""
    other_cpu(monkeypatch, lanes=8, matmul=False, dot=False)
    packed, x = any_weight("Q4_0", 16, 128), rows(1, 128)
    x[:, 32:64] = 0
    plan = plan_for(x.dtype, 1, packed)
    assert plan is not None
    steps = plan.arrange(x, 1)[X_SUMS].view(-1, TERMS_OF_WHOLE)[:, X_STEP]
    assert (steps * 2.0**-24).min() >= torch.finfo(torch.float32).tiny  # float16's least scale
    check(x, packed, 2.0**-22)


def test_inputs_of_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros, the smallest and largest numbers of bfloat16, and none."""
    other_cpu(monkeypatch, lanes=8, matmul=False, dot=False)
    packed = any_weight("Q4_0", 16, 64)
    packed.tensors["weight"].view(16, -1, 18)[:, :, 1] = 0x30  # scales of an eighth and more
    x = rows(6, 64)
    expected = matmul(x, packed)
    x[1] = 0
    x[2, 0], x[3, 40] = torch.inf, torch.nan
    x[4] *= 2.0**-120
    x[5] *= 2.0**100
    found = matmul(x, packed)
    assert torch.equal(found[0], expected[0])
    assert (found[1] == 0).all()
    assert found[2:4].isnan().all()
    torch.testing.assert_close(found[4], expected[4] * 2.0**-120, rtol=0, atol=2.0**-115)
    assert torch.equal(found[5], expected[5] * 2.0**100)
