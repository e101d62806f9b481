"""Replacements for PyTorch functions that modelling code calls: an element's bits are its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, overrides
from torch.nn import functional

from specexec_cli.models import own_bits
from specexec_cli.models.modelling_code import attends_by_interface, calls_of, methods_of
from specexec_cli.models.own_bits import hold_bits, use_own_bits
from specexec_cli.planning.built_sizes import text_model_class

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from conformance_configs import tiny_config


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


EXPERTS, ROWS = 32, 2051  # 3 threads have shares that end within a vector
ROUTERS = {
    "deepseek_v3": {"n_routed_experts": EXPERTS},
    "glm4_moe": {"n_routed_experts": EXPERTS},
    "dots1": {"n_routed_experts": EXPERTS},
    "minimax_m2": {"num_local_experts": EXPERTS},
    "llama4_text": {"num_local_experts": EXPERTS, "moe_layers": [1, 3]},
    "afmoe": {"num_experts": EXPERTS},
}


@pytest.mark.parametrize("model_type", ROUTERS)
@torch.no_grad()
def test_a_router_scores_a_row_as_if_it_were_alone(model_type: str) -> None:
    config = tiny_config(model_type, ROUTERS[model_type])
    model = text_model_class(config)._from_config(config)
    router = next(part for part in model.modules() if type(part).__name__.endswith("Router"))
    for weight in router.parameters():
        nn.init.normal_(weight)
    for part in router.modules():
        use_own_bits(part)
    hold_bits(router)

    def scores(hidden: Tensor) -> list[Tensor]:
        if model_type == "afmoe":
            return [router(hidden[None], torch.zeros(EXPERTS))[0]]
        bias = (torch.zeros(EXPERTS),) if model_type == "minimax_m2" else ()
        return [each for each in router(hidden, *bias) if each.is_floating_point()]

    for seed in range(8):
        hidden = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(seed))
        parts = [scores(part) for part in torch.split(hidden, ROWS // 4)]
        for whole, each in zip(scores(hidden), zip(*parts, strict=True), strict=True):
            assert torch.equal(whole, torch.cat(each))


class _Calls(nn.Module):
    """Calls sigmoid in one of three ways, and multiplies."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.kept = functional.softplus

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "module":
            return torch.sigmoid(x)
        return x.sigmoid() if self.way == "method" else self.helped(x)

    def helped(self, x: Tensor) -> Tensor:
        return _helper(x) if self.way == "function" else self.kept(x) @ x.t()


def _helper(x: Tensor) -> Tensor:
    return functional.sigmoid(x)


@pytest.mark.parametrize("way", ["module", "method", "function", "product"])
def test_every_way_to_call_is_found(way: str) -> None:
    module = _Calls(way)
    x = torch.randn(5, 7)
    expected = module(x)
    use_own_bits(module)
    hold_bits(module)
    found = module(x)
    torch.testing.assert_close(found, expected)
    for row in range(5):
        if way == "product":
            assert torch.equal(module.kept(x[row]), module.kept(x)[row])
        else:
            assert torch.equal(module(x[row : row + 1])[0], found[row])


def test_modelling_code_that_needs_nothing_is_left_as_it_is() -> None:
    """A dense layer's forwards run as transformers wrote them, without a mode."""
    config = tiny_config("llama")
    layer = text_model_class(config)._from_config(config).model.layers[0]
    use_own_bits(layer.self_attn)
    hold_bits(layer)
    changed = [name for name, part in layer.named_modules() if "forward" in vars(part)]
    assert changed == []
    assert attends_by_interface(layer)
    kind = type(layer.self_attn)
    assert "forward" in methods_of(kind)
    assert not any(call.name == "matmul" for call in calls_of(kind, "forward"))


def test_a_mode_that_was_left_behind_is_ended() -> None:
    """As Ctrl-C leaves it where it comes while a module begins."""
    own_bits._MODE.__enter__()
    own_bits._MODE.__enter__()
    own_bits.leave_mode()
    assert not own_bits._runs_within()
    own_bits.leave_mode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_takes_the_place_of_pytorchs_functions_computes_the_same(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((3, 40), (40, 9)))
    pair = x[None].repeat(2, 1, 1), weight[None].repeat(2, 1, 1)
    cases = [
        (torch.matmul, (x, weight)),
        (torch.matmul, (x, weight.t().contiguous().t())),
        (torch.bmm, pair),
        (torch.addmm, (torch.ones(9, dtype=dtype), x, weight)),
        (functional.softmax, (x, -1)),
        (torch.softmax, (x, 0)),
        (functional.gelu, (x,)),
        *((getattr(functional, name), (x,)) for name in ("mish", "elu", "softplus", "silu")),
    ]
    for function, given in cases:
        found = own_bits._IN_MODE[function](*given)
        assert found.dtype == dtype
        torch.testing.assert_close(found, function(*given), rtol=0.02, atol=0.02)
    empty = torch.full((2, 3, 9), torch.nan, dtype=dtype)
    found = own_bits._IN_MODE[torch.baddbmm](empty, *pair, beta=0, alpha=0.5)
    torch.testing.assert_close(found, 0.5 * torch.bmm(*pair), rtol=0.02, atol=0.02)


def test_ctrl_c_where_pytorch_has_left_the_mode_is_ctrl_c() -> None:
    """PyTorch leaves it for single operations, in Python, where a signal may come."""

    def interrupted() -> None:
        overrides._pop_mode()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        own_bits._within(interrupted)()
    assert not overrides._get_current_function_mode_stack()
