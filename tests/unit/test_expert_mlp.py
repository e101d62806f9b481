"""A layer's experts together: bit by bit what one after another gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specexec_kernels import cpu_jit
from specexec_kernels.cpu_experts import Experts
from specexec_kernels.cpu_layer import Workspace
from specexec_kernels.formats.fp4 import Fp4
from torch import Tensor, nn
from transformers.activations import ACT2FN

from specexec_cli.models.expert_mlp import PerExpert, Routing, _ActTimesUp
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.own_bits import use_own_bits
from specexec_cli.models.packed_linear import QuantizedLinear

EXPERTS, HIDDEN, INNER = 7, 64, 96


def _silu() -> nn.Module:
    found = ACT2FN["silu"]
    use_own_bits(found)
    return found


def block(dtype: torch.dtype, up: torch.dtype | None = None) -> PerExpert:
    """Experts in a dtype, `up` in another one if it is given."""
    torch.manual_seed(0)
    experts = nn.ModuleList()
    for _ in range(EXPERTS):
        sizes = {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}
        linears = nn.ModuleDict({n: MixedLinear(*size, bias=False) for n, size in sizes.items()})
        for name, (inputs, outputs) in sizes.items():
            weight = torch.randn(outputs, inputs).to((up if name == "up" else None) or dtype)
            linears[name].weight = nn.Parameter(weight, requires_grad=False)
        experts.append(linears)
    found = PerExpert(experts, _ActTimesUp(_silu()))
    return found


def one_after_another(moe: PerExpert, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros_like(rows)
    for number in torch.unique(index).tolist():
        row, choice = torch.where(index == number)
        expert = moe.experts[number]
        own = rows[row]
        output = expert["down"](moe.gate.act_fn(expert["gate"](own)) * expert["up"](own))
        total.index_add_(0, row, (output * weights[row, choice, None]).to(total.dtype))
    return total


@pytest.mark.parametrize("count", [1, 2, 9, 70])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_together_as_one_after_another(
    count: int, computed: torch.dtype, stored: torch.dtype
) -> None:
    moe = block(stored)
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, HIDDEN, generator=generator).to(computed)
    weights, index = torch.rand(count, EXPERTS, generator=generator).topk(3, dim=-1)
    for given in (weights, weights.to(computed)):
        expected = one_after_another(moe, rows, index, given)
        assert torch.equal(moe(rows, index, given), expected)


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_matrices_of_an_expert_that_are_stored_differently(computed: torch.dtype) -> None:
    moe = block(torch.float32, up=torch.bfloat16)
    rows = torch.randn(3, HIDDEN).to(computed)
    weights, index = torch.rand(3, EXPERTS).topk(2, dim=-1)
    expected = one_after_another(moe, rows, index, weights)
    assert torch.equal(moe(rows, index, weights), expected)


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_packed_experts_with_biases(count: int, computed: torch.dtype) -> None:
    """As gpt-oss has them: a bias is added behind the rounding, together as alone."""
    experts = nn.ModuleList(
        nn.ModuleDict({"gate": packed(seed), "up": packed(seed + 10), "down": packed(seed + 20)})
        for seed in range(4)
    )
    moe = PerExpert(experts, _ActTimesUp(_silu()))
    rows = torch.randn(count, HIDDEN).to(computed)
    weights, index = torch.rand(count, 4).topk(2, dim=-1)
    known = [moe.weights_of(number) for number in range(4)]
    assert moe.takes_together(rows, known)
    assert torch.equal(moe(rows, index, weights), one_after_another(moe, rows, index, weights))


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, None])
def test_a_row_for_each_expert_is_one_call(
    stored: torch.dtype | None, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of plain and of packed weights, of one row or of several that share no expert."""
    moe, calls, run = (without_biases() if stored is None else block(stored)), [], Experts.run

    def counted(self: Experts, *given: Any) -> Tensor:
        calls.append(len(given[1]))
        return run(self, *given)

    monkeypatch.setattr(Experts, "run", counted)
    moe.space = Workspace()
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for choices in ([[4, 0, 6]], [[2, 5, 3], [1, 6, 0]], [[1]], [[3, 2], [2, 1]]):
                index = torch.tensor(choices)
                rows = torch.randn(len(choices), HIDDEN).to(computed)
                weights = torch.rand(index.shape).to(computed)
                expected = one_after_another(moe, rows, index, weights)
                assert torch.equal(moe(rows, index, weights), expected)
    finally:
        torch.set_num_threads(before)
    if cpu_jit.has_dot() or computed == torch.float32:
        assert calls == [3, 6, 1] * 2  # the last rows share an expert


def without_biases() -> PerExpert:
    experts = nn.ModuleList(
        nn.ModuleDict(
            {name: packed(seed + 10 * n) for n, name in enumerate(("gate", "up", "down"))}
        )
        for seed in range(EXPERTS)
    )
    for linear in (linear for expert in experts for linear in expert.values()):
        linear.bias = None
    return PerExpert(experts, _ActTimesUp(_silu()))


def test_experts_that_stay_are_told_from_one_another() -> None:
    moe = block(torch.float32)
    rows = torch.randn(4, HIDDEN)
    moe.stay(True)
    for seed in range(3):
        weights, index = torch.rand(4, EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(
            3, dim=-1
        )
        expected = one_after_another(moe, rows, index, weights)
        assert torch.equal(moe(rows, index, weights), expected)
    other = torch.randn_like(moe.experts[int(index[0, 0])]["down"].weight)
    moe.experts[int(index[0, 0])]["down"].weight = nn.Parameter(other, requires_grad=False)
    moe.stay(False)
    changed = one_after_another(moe, rows, index, weights)
    assert torch.equal(moe(rows, index, weights), changed)
    assert not torch.equal(changed, expected)


def packed(seed: int) -> QuantizedLinear:
    fmt = Fp4(64, 32)
    stored = {part.leaf: (part.shape(HIDDEN, HIDDEN), torch.uint8) for part in fmt.parts}
    linear = QuantizedLinear(HIDDEN, HIDDEN, fmt, stored, bias=True)
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in list(linear.named_parameters()):
        values = torch.randint(120, 131, parameter.shape, generator=rng).to(torch.uint8)
        if name == "bias":
            values = torch.randn(HIDDEN, generator=rng).half()
        setattr(linear, name, nn.Parameter(values, requires_grad=False))
    return linear


def test_routing() -> None:
    routing = Routing(torch.tensor([[4, 1], [1, 0], [4, 2]]))
    assert routing.wanted == {0: 1, 1: 2, 2: 1, 4: 2}
    assert routing.rows_of(4) == [0, 2]
    # row 0 adds expert 1 and then expert 4, so 4's output is its second
    assert routing.places_of([4, 0]) == [1, 5, 2]
    assert [routing.choices[place] for place in (1, 5, 2)] == [0, 4, 3]
