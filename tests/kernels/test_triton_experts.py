"""A mixture's experts in few launches against each expert alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import random_blocks
from random_weights import FORMATS, random_weight
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gguf import GGUF_FORMATS
from specexec_kernels.formats.plain import plain_weight
from torch import Tensor

EXPERTS, INPUTS, OUTPUTS, CHOSEN = 6, 256, 40, 3
NAMES = ("gptq-4", "awq", "mxfp4", "nf4", "fp8-block", "Q4_K")
Experts = list[list[PackedWeight]]


def weight(name: str, seed: int, device: torch.device) -> PackedWeight:
    if name == "plain":
        generator = torch.Generator().manual_seed(seed)
        found = plain_weight(torch.randn(OUTPUTS, INPUTS, generator=generator).bfloat16())
    elif name in GGUF_FORMATS:
        fmt = GGUF_FORMATS[name]
        columns = fmt.parts[0].shape(OUTPUTS, INPUTS)[1]
        blocks = torch.from_numpy(random_blocks(Kind[name], OUTPUTS * columns, seed=seed))
        found = PackedWeight(fmt, INPUTS, OUTPUTS, {"weight": blocks.view(OUTPUTS, columns)})
    else:
        found = random_weight(FORMATS[name], OUTPUTS, INPUTS, seed=seed)
    return replace(found, tensors={leaf: t.to(device) for leaf, t in found.tensors.items()})


def experts(name: str, device: torch.device, linears: int = 2) -> Experts:
    return [[weight(name, 10 * e + n, device) for n in range(linears)] for e in range(EXPERTS)]


def choices(rows: int, device: torch.device, seed: int = 0) -> Tensor:
    """(rows, CHOSEN) experts; the last expert has no row."""
    scores = torch.rand(rows, EXPERTS - 1, generator=torch.Generator().manual_seed(seed))
    return scores.topk(CHOSEN, dim=-1).indices.to(device)


def inputs(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, INPUTS, generator=generator).to(dtype).to(device)


def grouped(x: Tensor, own: Experts, chosen: Tensor, biases: list[Tensor] | None = None) -> Tensor:
    """(linears, rows, CHOSEN, outputs)."""
    from specexec_kernels import triton_experts

    each = [[None] * len(own[0]) if biases is None else [biases[e]] * len(own[0])
            for e in range(EXPERTS)]  # fmt: skip
    table = triton_experts.table_of(own, each)
    assert table is not None
    table = replace(table, addresses=table.addresses.to(x.device))
    routes = triton_experts.routes(chosen, EXPERTS, x.dtype)
    places = chosen.numel()
    out = triton_experts.products(x, table, routes, CHOSEN, places)
    sorted_at = routes[places : 2 * places].long()
    return out[:, sorted_at].view(len(own[0]), *chosen.shape, -1)


def alone(x: Tensor, own: PackedWeight) -> Tensor:
    from specexec_kernels import triton_rows

    return triton_rows.quantized_matmul(x, own)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 21])
@pytest.mark.parametrize("cuts", [1, 2])
def test_a_row_has_the_bits_of_its_expert_alone(
    name: str, rows: int, cuts: int, device: torch.device, matrix_units: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from specexec_kernels import triton_rows

    monkeypatch.setattr(triton_rows, "LEAST_INPUTS", INPUTS // cuts)
    own, x = experts(name, device), inputs(rows, torch.float16, device)
    chosen = choices(rows, device)
    found = grouped(x, own, chosen)
    for expert, linear in product(range(EXPERTS - 1), range(2)):
        row, choice = torch.where(chosen == expert)
        expected = alone(x[row], own[expert][linear])
        assert torch.equal(found[linear, row, choice], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_plain_weights(dtype: torch.dtype, device: torch.device) -> None:
    own, x, chosen = experts("plain", device), inputs(9, dtype, device), choices(9, device)
    found = grouped(x, own, chosen).double()
    for row, choice in product(range(9), range(CHOSEN)):
        dense = own[int(chosen[row, choice])][1].unpack_to(dtype).double()
        expected = dense @ x[row].double()
        # one rounding of the result, and sums in float32 as in test_triton_rows
        error = torch.finfo(dtype).eps * expected.abs()
        error += 4 * torch.finfo(torch.float32).eps * (dense.abs() @ x[row].double().abs())
        assert ((found[1, row, choice] - expected).abs() <= error).all()


def test_a_row_has_the_same_bits_among_any_number_of_others(
    device: torch.device, matrix_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of 16, 32 and 64 places; the last expert has none.

    Two programs share the inputs of the first row, and one takes all of them where places are many.
    """
    from specexec_kernels import triton_rows

    monkeypatch.setattr(triton_rows, "LEAST_INPUTS", INPUTS // 2)
    monkeypatch.setattr(triton_rows, "PROGRAMS", 4)
    own = experts("mxfp4", device, 1)
    x, chosen = inputs(130, torch.float16, device), choices(130, device)
    together = grouped(x, own, chosen)
    for first, last in ((0, 1), (3, 20), (7, 57)):
        found = grouped(x[first:last], own, chosen[first:last])
        assert torch.equal(found, together[:, first:last]), (first, last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_bias_is_added_as_for_an_expert_alone(dtype: torch.dtype, device: torch.device) -> None:
    own, x, chosen = experts("mxfp4", device, 1), inputs(5, dtype, device), choices(5, device)
    biases = [torch.randn(OUTPUTS).bfloat16().to(device) for _ in range(EXPERTS)]
    found = grouped(x, own, chosen, biases)
    expected = grouped(x, own, chosen) + torch.stack(biases)[chosen].to(dtype)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("weights", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_are_rounded_as_pytorch_adds_them(
    dtype: torch.dtype, weights: torch.dtype, device: torch.device
) -> None:
    from specexec_kernels import triton_experts

    chosen, rng = choices(7, device), torch.Generator().manual_seed(0)
    outputs = torch.randn(7 * CHOSEN, OUTPUTS, generator=rng).to(dtype).to(device)
    given = torch.rand(7, CHOSEN, generator=rng).to(weights).to(device)
    routes = triton_experts.routes(chosen, EXPERTS, dtype)
    by_choice = outputs[routes[7 * CHOSEN : 14 * CHOSEN].long()].view(7, CHOSEN, -1)
    rising = chosen.argsort(-1)
    expected = torch.zeros(7, OUTPUTS, dtype=dtype, device=device)
    for rank in range(CHOSEN):
        row, choice = torch.arange(7), rising[:, rank]
        expected += (by_choice[row, choice] * given[row, choice, None]).to(dtype)
    assert torch.equal(triton_experts.row_sums(outputs, chosen, given, routes), expected)


def test_experts_that_are_not_alike_have_no_table(device: torch.device) -> None:
    from specexec_kernels import triton_experts

    none = [[None]] * 2
    first, second, other = (weight(n, 0, device) for n in ("gptq-4", "gptq-4", "awq"))
    assert triton_experts.table_of([[first], [second]], none) is not None
    assert triton_experts.table_of([[first], [other]], none) is None
    apart = replace(
        second, tensors={leaf: t.T.contiguous().T for leaf, t in second.tensors.items()}
    )
    assert triton_experts.table_of([[apart], [apart]], none) is None
    bias = torch.zeros(OUTPUTS, device=device)
    assert triton_experts.table_of([[first], [second]], [[bias], [None]]) is None


@pytest.mark.parametrize("rows", [1, 700])
def test_places_are_sorted_by_expert_and_row(rows: int, device: torch.device) -> None:
    from specexec_kernels import triton_experts

    chosen = choices(rows, device)
    places = chosen.numel()
    found = triton_experts.routes(chosen, EXPERTS, torch.float16)
    order, position = found[:places].long(), found[places : 2 * places].long()
    assert torch.equal(order, chosen.flatten().argsort(stable=True))
    assert torch.equal(order[position], torch.arange(places, device=device))
