"""Rows that are rounded to 8 bits, times packed integers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from other_cpu import other_cpu
from random_weights import FORMATS, any_weight, random_weight
from specexec_kernels import cpu_jit
from specexec_kernels.cpu_ir_emit import Quads
from specexec_kernels.cpu_matmul import matmul
from specexec_kernels.cpu_matmul_plan import rounds_rows
from specexec_kernels.formats.base import PackedFormat, PackedWeight
from specexec_kernels.formats.gguf import GGUF_FORMATS
from specexec_kernels.formats.integers import Int8
from torch import Tensor

ALL: dict[str, PackedFormat] = {**FORMATS, **GGUF_FORMATS}
ROUNDING = [name for name, fmt in ALL.items() if rounds_rows(fmt)]
IN_EVERY_SHAPE = ("Q4_0", "Q4_K", "awq", "int8-zeros")

pytestmark = pytest.mark.skipif(not ROUNDING, reason="no products of integers")


def forms() -> list[tuple[int, Quads]]:
    """Lanes and instructions of other CPUs that this one can stand for."""
    found: list[tuple[int, Quads]] = [(8, "int16 sums")] if cpu_jit.features().get("avx2") else []
    if cpu_jit.features().get("avxvnni"):
        found.append((8, "vnni"))
    if cpu_jit.lanes() == 16 and cpu_jit.has_int16():
        found.append((16, "int16 sums"))
    return found


def weight(name: str, outputs: int, inputs: int) -> PackedWeight:
    return replace(any_weight(name, outputs, inputs), eight_bit_rows=True)


def rows(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)


def rounded(x: Tensor) -> Tensor:
    """The rows as every 32 inputs are rounded, by the definition of llama.cpp's Q8_0 but for its
    steps, which have 16 bits there."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 32)).view(x.shape[0], -1, 32)
    largest = padded.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    whole = (padded * inverse).round().double()
    return (whole * (largest / 127)).reshape(x.shape[0], -1)[:, : x.shape[1]]


class SevenBits(Int8):
    """Codes of 7 bits, which no format has: those of weights from -128 to -1."""

    code_bits: ClassVar[int] = 7


def of_scale_one(name: str, outputs: int, inputs: int) -> PackedWeight:
    """A weight whose values are integers. The first 16 outputs have only the largest codes."""
    if name == "7 bits":
        packed = random_weight(SevenBits(64, "scales", "F32", (1, 0)), outputs, inputs)
        packed.tensors["weight"].bitwise_or_(-128)
    else:
        packed = any_weight(name, outputs, inputs)
    codes = packed.tensors[packed.format.parts[0].leaf]
    if "scales" in packed.tensors:
        packed.tensors["scales"].fill_(1)
        (codes[:, :16] if packed.format.goes_down else codes[:16]).fill_(-1)
    else:
        blocks = codes.view(outputs, -1, packed.format.parts[0].items)
        blocks[:16] = 0xFF
        scale = 208 if name == "Q6_K" else 0
        blocks[..., scale], blocks[..., scale + 1] = 0, 0x3C  # a float16 of 1
        if name == "Q6_K":
            blocks[..., 192:208] = 1
    return replace(packed, eight_bit_rows=True)


def check(x: Tensor, packed: PackedWeight) -> Tensor:
    dense, found = packed.unpack().double(), matmul(x, packed)
    # weights are sums of a scaled code and an offset, which may be larger than they are
    bound = (
        2.0**-20
        * rounded(x).abs().max()
        * torch.clamp(dense.abs().sum(1), min=float(dense.abs().max()) * 4)
    )
    assert ((found.double() - rounded(x) @ dense.T).abs() <= bound).all()
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in ROUNDING), ("Q4_0", torch.bfloat16),
     ("Q4_K", torch.bfloat16)],
)  # fmt: skip
def test_products_are_those_of_the_rounded_rows(name: str, dtype: torch.dtype) -> None:
    packed, x = weight(name, 52, 256), rows(19, 256, dtype)
    together = check(x, packed)
    assert torch.equal(matmul(x[:1], packed), together[:1])


def test_inputs_that_end_within_a_run_keep_their_rows() -> None:
    """Of blocks of 16 inputs, whose arranged rows have no place for half a run."""
    fmt = replace(FORMATS["gptq-4"], group=16)  # type: ignore[call-arg]
    packed = random_weight(fmt, 64, 48)
    x = rows(19, 48)
    assert torch.equal(matmul(x, replace(packed, eight_bit_rows=True)), matmul(x, packed))


@pytest.mark.parametrize("form", forms(), ids=str)
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q6_K", "gptq-4"])
def test_every_instruction_finds_the_same_bits(
    name: str, form: tuple[int, Quads], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, x = weight(name, 104, 512), rows(40, 512)
    here = matmul(x, packed)
    other_cpu(monkeypatch, lanes=form[0], matmul=False, dot=False, quads=form[1])
    for count in (1, 40):
        assert torch.equal(matmul(x[:count], packed), here[:count])


@pytest.mark.parametrize("name", IN_EVERY_SHAPE)
def test_a_rows_bits_are_its_own(name: str) -> None:
    packed, before = weight(name, 200, 512), torch.get_num_threads()
    x = rows(129, 512)
    together = check(x, packed)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for some in (slice(0, 1), slice(5, 6), slice(3, 7), slice(40, 57), slice(0, 129)):
                assert torch.equal(matmul(x[some], packed), together[some])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "inputs"), [("gptq-4", 200), ("gptq-8", 108)])
def test_last_inputs_that_fill_no_run(name: str, inputs: int) -> None:
    check(
        rows(3, 200 if name.startswith("gptq") else 192),
        weight(name, 48, 192 + 8 * (name[0] == "g")),
    )


@pytest.mark.parametrize("form", [None, *forms()], ids=str)
@pytest.mark.parametrize("name", ["gptq-2", "gptq-3", "Q4_0", "Q5_0", "Q6_K", "7 bits", "Q8_0"])
def test_sums_are_those_of_integers(
    name: str, form: tuple[int, Quads] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of codes of 2 to 8 bits. In the first outputs and rows all are at their largest, where sums
    of int16 are closest to their end."""
    if form is not None:
        other_cpu(monkeypatch, lanes=form[0], matmul=False, dot=False, quads=form[1])
    packed = of_scale_one(name, 64, 256)
    x = torch.randint(-127, 128, (16, 256), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::32] = 127.0  # so that every step is 1
    x[0], x[1], x[2, ::2], x[2, 1::2] = 127.0, -127.0, 127.0, -127.0
    expected = x.long() @ packed.unpack().long().T
    # a kernel is compiled for each count: other forms have their sums of few rows tested above
    for count in (1, 2, 16) if form == (8, "int16 sums") else (16,):
        assert torch.equal(matmul(x[:count], packed), expected[:count].float())


def test_inputs_of_every_size() -> None:
    packed = weight("Q4_0", 16, 64)
    packed.tensors["weight"].view(16, -1, 18)[:, :, 1] = 0x30  # scales of an eighth and more
    x = rows(7, 64)
    expected = matmul(x, packed)
    x[1] = 0
    x[2, 0], x[3, 40] = torch.inf, torch.nan
    x[4] *= 2.0**-60
    x[5] *= 2.0**100
    x[6] = 2.0**-140
    found = matmul(x, packed)
    assert torch.equal(found[0], expected[0])
    assert (found[1] == 0).all()
    assert found[2:4].isnan().all()
    assert torch.equal(found[4], expected[4] * 2.0**-60)
    assert torch.equal(found[5], expected[5] * 2.0**100)
    assert (found[6] == 0).all()  # too small to have an inverse


def test_other_formats_are_multiplied_as_they_are() -> None:
    for name in ("nf4", "int8-across-units", "gptq-4-shuffled"):
        packed, x = any_weight(name, 48, 192), rows(2, 192)
        assert torch.equal(matmul(x, replace(packed, eight_bit_rows=True)), matmul(x, packed))
