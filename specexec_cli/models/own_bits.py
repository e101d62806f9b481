"""Replaces PyTorch functions that transformers' code calls, so that a row's bits are its own.

On a CPU, PyTorch multiplies activations in an order that depends on how many there are. It also
computes the elements that do not fill a vector, at the end of each thread's share, with other
operations than the rest. So an element may round differently in a pass with other rows. The
functions here take the place of PyTorch's in transformers' modules, in two ways:
- A method that looks a function up in a module of PyTorch, as in `torch.sigmoid(x)`, is replaced by
  a copy whose globals lead to the functions here (`use_own_bits`).
- A method that calls methods of tensors or operators, as in `x.sigmoid()` or `x @ y`, runs within a
  TorchFunctionMode (`hold_bits`), which takes a microsecond for each operation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from specexec_kernels import cpu_activation, cpu_chains, cpu_matmul
from specexec_kernels.cpu_activation import Activation
from specexec_kernels.formats.plain import plain_weight
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from specexec_cli.models.linear import mixed_linear
from specexec_cli.models.modelling_code import Call, calls_of, methods_of, with_globals
from specexec_cli.planning.memory import BLOCK_ROWS

_SHARE = 16384  # elements that PyTorch computes in one thread; a multiple of _WHOLE
_WHOLE = 64  # elements that are a pair of whole vectors in any dtype, as PyTorch takes them


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return mixed_linear(rows, weight, bias, BLOCK_ROWS)


def _by_kernel(activation: Activation, otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An activation that runs our kernel if it supports the tensor, else `otherwise`."""

    def function(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if cpu_activation.supports(x):
            return cpu_activation.apply(activation, x)
        return otherwise(x, *args, **kwargs)

    return function


def _in_whole_vectors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An elementwise function that calls `function` with whole vectors only, of one thread's share.

    Then PyTorch computes all elements with the same operations.
    """

    def of_vectors(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # parameters are the same in every pass
        if x.device.type != "cpu" or isinstance(x, nn.Parameter):
            return function(x, *args, **kwargs)
        count = x.numel()
        flat = functional.pad(x.reshape(-1), (0, -count % _WHOLE))
        parts = [function(part, *args, **kwargs) for part in torch.split(flat, _SHARE)]
        return torch.cat(parts)[:count].view(x.shape)

    return of_vectors


softplus = _in_whole_vectors(functional.softplus)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    by_tanh = approximate == "tanh"
    return _GELU_TANH(x) if by_tanh else functional.gelu(x.contiguous(), approximate=approximate)


def _sums(left: Tensor, right: Tensor) -> Tensor | None:
    """left @ right in float32; None if no kernel computes it."""
    if left.ndim < 2 or right.ndim < 2 or not cpu_chains.takes(left, right):
        return None
    if right.ndim > 2:
        return cpu_chains.product(left, right)
    if not cpu_matmul.takes_plain(left.dtype):
        return None
    turned = right.t().is_contiguous()  # most modelling code multiplies by weight.t()
    weight = plain_weight(right.t() if turned else right.contiguous(), transposed=not turned)
    sums = cpu_matmul.matmul(left.reshape(-1, left.shape[-1]), weight)
    # contiguous as PyTorch's products are, since modelling code takes views of them
    return sums.contiguous().view(*left.shape[:-1], right.shape[1])


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    sums = _sums(left, right)
    return torch.matmul(left, right) if sums is None else sums.to(left.dtype)


def _added(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that computes beta * input + alpha * (left @ right), as addmm and baddbmm do.

    Args:
        otherwise: PyTorch's function, for tensors that no kernel multiplies.
    """

    def function(
        input: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        sums = _sums(left, right)
        if sums is None:
            return otherwise(input, left, right, beta=beta, alpha=alpha)
        sums = sums * alpha
        # with beta 0, PyTorch ignores `input`, even NaN
        return (sums + input.float() * beta if beta else sums).to(left.dtype)

    return function


def _softmax(
    x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **kwargs: Any
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    if dim is None or not cpu_chains.takes(x):
        return functional.softmax(x, dim, **kwargs)
    return cpu_chains.softmax(x.movedim(dim, -1)).movedim(-1, dim)


_GELU_TANH = _by_kernel("gelu_tanh", functools.partial(functional.gelu, approximate="tanh"))
# Replacements by their names in torch, torch.nn.functional and torch.Tensor.
_OF_ELEMENTS: dict[str, Callable[..., Tensor]] = {
    "sigmoid": _by_kernel("sigmoid", torch.sigmoid),
    "silu": _by_kernel("silu", functional.silu),
    "gelu": _gelu,
    "softplus": softplus,
    "logsigmoid": _in_whole_vectors(functional.logsigmoid),
    "mish": _in_whole_vectors(functional.mish),
    "elu": _in_whole_vectors(functional.elu),
    "selu": _in_whole_vectors(functional.selu),
    "celu": _in_whole_vectors(functional.celu),
}
_OF_WEIGHTS: dict[str, Callable[..., Tensor]] = {"linear": _linear}
_PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _added(torch.addmm),
    "baddbmm": _added(torch.baddbmm),
}
# PyTorch's softmax sums a row in one order as long as the row's length stays. It changes only in
# attention, which runs within the mode anyway, because of its products.
_OF_ROWS: dict[str, Callable[..., Tensor]] = {"softmax": _softmax}
_BY_COPY = {**_OF_ELEMENTS, **_OF_WEIGHTS}
_IN_MODE: Mapping[Any, Callable[..., Tensor]] = {
    getattr(owner, name): own
    for name, own in {**_BY_COPY, **_PRODUCTS, **_OF_ROWS}.items()
    for owner in (torch, functional, Tensor)
    if hasattr(owner, name)
}


class _With:
    """Stands for a Python module, with some of its names replaced."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _with_own(module: ModuleType, **names: Any) -> _With:
    own = {name: own for name, own in _BY_COPY.items() if hasattr(module, name)}
    return _With(module, **own, **names)


_FUNCTIONAL = _with_own(functional)
_NN = _With(nn, functional=_FUNCTIONAL)
# For each module of PyTorch that modelling code imports, what takes its place in a copy's globals.
_MODULES: Mapping[ModuleType, _With] = {
    functional: _FUNCTIONAL, nn: _NN, torch: _with_own(torch, nn=_NN),
}  # fmt: skip


def with_own_bits(function: Any) -> FunctionType:
    """A copy of a function of modelling code whose globals lead to this module's functions."""
    seen = {
        name: _MODULES[value]
        for name, value in function.__globals__.items()
        if isinstance(value, ModuleType) and value in _MODULES
    }
    return with_globals(function, seen)


def use_own_bits(module: nn.Module) -> None:
    """Has a layer's module call this module's functions in place of PyTorch's, on any device.

    That concerns functions that its methods look up in modules of PyTorch, and functions that it
    keeps as attributes, as activations do.
    """
    kind: type = type(module)
    for method, calls in _calls(kind).items():
        if any(call.own and call.in_module and call.name in _BY_COPY for call in calls):
            copy = with_own_bits(inspect.unwrap(getattr(kind, method)))
            setattr(module, method, MethodType(copy, module))
    for name, value in list(vars(module).items()):
        kept = value if isinstance(value, functools.partial) else None
        function = value if kept is None else kept.func
        if isinstance(function, FunctionType | BuiltinFunctionType) and function in _IN_MODE:
            own = _IN_MODE[function]
            setattr(module, name, own if kept is None else functools.partial(own, **kept.keywords))


class _Mode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _IN_MODE.get(func, func)(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        """Leaves the mode, unless Ctrl-C came where PyTorch had left it for one operation."""
        if _runs_within():
            super().__exit__(*error)  # type: ignore[no-untyped-call]


_MODE = _Mode()


def hold_bits(layer: nn.Module) -> None:
    """Has methods of a layer's modules run within the mode, for a layer on a CPU.

    Only methods that call functions of PyTorch in a way that `use_own_bits` does not reach.
    """
    for module in layer.modules():
        kind: type = type(module)
        for method, calls in _calls(kind).items():
            if any(map(_wants_mode, calls)):
                setattr(module, method, _within(getattr(module, method)))


def _wants_mode(call: Call) -> bool:
    """Whether a call reaches this module's function only within the mode, not in a copy."""
    if call.name in _PRODUCTS or call.name == "@":
        return True
    if call.in_module:
        return call.name in _BY_COPY and not call.own
    return call.name in _BY_COPY and hasattr(Tensor, call.name)


def _within(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def inside(*args: Any, **kwargs: Any) -> Any:
        if _runs_within():
            return forward(*args, **kwargs)
        with _MODE:
            return forward(*args, **kwargs)

    return inside


def _runs_within() -> bool:
    return _get_current_function_mode() is _MODE  # type: ignore[no-untyped-call]


def leave_mode() -> None:
    """Ends the mode if Ctrl-C left it on, which can happen when it comes while a method begins or
    ends."""
    while _runs_within():
        _MODE.__exit__(None, None, None)


@functools.cache
def _calls(kind: type) -> Mapping[str, tuple[Call, ...]]:
    """The calls of each method of a class of modelling code; empty for our own classes."""
    if kind.__module__.startswith("specexec_cli."):
        return {}
    return {method: tuple(calls_of(kind, method)) for method in methods_of(kind)}
