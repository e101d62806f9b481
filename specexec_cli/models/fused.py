"""Runs norms and rotary positions of transformers' code as one kernel each, on a GPU with Triton.

PyTorch starts seven kernels for a norm and ten to turn queries and keys; a layer of few rows is
done before as many are started. Which modules and functions do what our kernels do is found by
trying them: on a CPU, on random numbers, their results must be those of the formula bit for bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from itertools import product
from types import FunctionType, MethodType
from typing import Any

import torch
from specexec_kernels import dispatch
from torch import Tensor, nn

from specexec_cli.models.decoder_layer import is_norm
from specexec_cli.models.modelling_code import with_globals

_TURNS = "apply_rotary_pos_emb"  # as transformers calls it in every file
_WIDTH = 16  # of what is tried


def fuse(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Has a layer's norms and rotary positions run as one kernel each, where they are known.

    Args:
        layer: of transformers' code.
        dtype: the compute dtype, which norms return.
    """
    if not dispatch.uses_triton(device):
        return
    for module in layer.modules():
        if is_norm(module):
            _fuse_norm(module, dtype)
        elif _turns_as_known(_turning(module)):
            own = with_globals(_forward(module), {_TURNS: _turned(_turning(module))})
            module.forward = MethodType(own, module)


def is_fused(module: nn.Module) -> bool:
    """Whether a norm runs as one kernel, which gives each row bits of its own."""
    return isinstance(vars(module).get("forward"), _Norm)


class _Norm:
    """Stands in the place of a norm's `forward`."""

    def __init__(
        self, module: Any, eps: float, *, centred: bool, rounded: bool, dtype: torch.dtype
    ) -> None:
        self._parameters = module._parameters
        self._eps, self._centred, self._rounded, self._dtype = eps, centred, rounded, dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        from specexec_kernels import triton_norm

        weight = self._parameters["weight"]
        return triton_norm.rms_norm(
            hidden, weight, self._eps, centred=self._centred, rounded=self._rounded,
            out_dtype=self._dtype,
        )  # fmt: skip


def _fuse_norm(module: Any, dtype: torch.dtype) -> None:
    kind: type = type(module)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, Tensor) or weight.ndim != 1:
        return
    if set(module._parameters) == {"weight"} and not module._modules and not module._buffers:
        for centred, rounded in product((False, True), repeat=2):
            if _is_formula(kind, _settings(module), eps, centred, rounded):
                module.forward = _Norm(module, eps, centred=centred, rounded=rounded, dtype=dtype)


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """What a module keeps besides its parameters, as far as it can tell norms apart."""
    plain = (bool, int, float, str)
    kept = {name: value for name, value in vars(module).items() if isinstance(value, plain)}
    return tuple(sorted(kept.items(), key=lambda pair: pair[0]))


@cache
def _is_formula(
    kind: Any,
    settings: tuple[tuple[str, Any], ...],
    eps: float,
    centred: bool,
    rounded: bool,
) -> bool:
    """Whether a class of norms computes what the kernel does, on float32 and on float16 rows."""
    if len(inspect.signature(kind.forward).parameters) != 2:
        return False  # a norm with a gate
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_WIDTH, generator=generator)
    probe = kind.__new__(kind)
    nn.Module.__init__(probe)
    probe.__dict__.update(settings)
    probe.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    for dtype in (torch.float32, torch.float16):
        # small numbers too, where what is added to the mean square counts
        rows = torch.randn(4, _WIDTH, generator=generator) * torch.tensor([[1e-3], [0.1], [1], [9]])
        rows = rows.to(dtype)
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        factor = 1.0 + weight if centred else weight
        expected = factor * wide.to(dtype) if rounded else (factor * wide).to(dtype)
        if not torch.equal(kind.forward(probe, rows), expected):
            return False
    return True


def _forward(module: nn.Module) -> FunctionType | None:
    """A module's `forward`; None where it is no function of Python any more."""
    function = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    return function if isinstance(function, FunctionType) else None


def _turning(module: nn.Module) -> Any:
    """The function of rotary positions that a module's `forward` calls; None if it calls none."""
    function = _forward(module)
    if function is None or _TURNS not in function.__code__.co_names:
        return None
    return function.__globals__.get(_TURNS)


@cache
def _turns_as_known(function: Any) -> bool:
    """Whether a function of modelling code turns queries and keys as the kernel does."""
    names = ["q", "k", "cos", "sin", "unsqueeze_dim"]
    if function is None or list(inspect.signature(function).parameters) != names:
        return False
    return _agrees(function, _WIDTH) is True and _agrees(function, _WIDTH // 2) is not False


def _agrees(function: Callable[..., Any], width: int) -> bool | None:
    """Whether a function gives the kernel's bits for angles of `width`; None if it takes none."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, _WIDTH, generator=generator) for heads in (4, 2))
    cos, sin = (torch.randn(1, 3, width, generator=generator) for _ in range(2))
    try:
        found = function(q, k, cos, sin)
    except RuntimeError:  # shapes that do not go together
        return None
    return all(
        torch.equal(each, _by_formula(given, cos, sin))
        for each, given in zip(found, (q, k), strict=True)
    )


def _by_formula(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    part, rest = rows[..., : cos.shape[-1]], rows[..., cos.shape[-1] :]
    low, high = part.chunk(2, dim=-1)
    return torch.cat([part * cos + torch.cat([-high, low], dim=-1) * sin, rest], dim=-1)


def _turned(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """What is called in the place of a file's own function."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        from specexec_kernels import triton_rotary

        if unsqueeze_dim == 1 and triton_rotary.takes(q, k, cos, sin):
            return triton_rotary.rotary(q, k, cos, sin)
        return otherwise(q, k, cos, sin, unsqueeze_dim)

    return turned
