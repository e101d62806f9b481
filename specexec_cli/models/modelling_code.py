"""Finds the functions that a module of transformers' modelling code calls, in its bytecode."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # transformers' table of attention functions by name


@dataclass(frozen=True, slots=True)
class Call:
    """A name that code looks up, such as `sigmoid` in `torch.sigmoid(x)`."""

    name: str  # "@" for the matrix product operator
    in_module: bool  # whether it is an attribute of a Python module, as `sigmoid` of `torch`
    own: bool  # whether the method itself looks it up, not a function that the method calls


def with_globals(function: Any, names: Mapping[str, Any]) -> FunctionType:
    """A copy of a function of modelling code, for which some global names mean other things."""
    assert isinstance(function, FunctionType), "modelling code is Python"
    copy = FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def methods_of(kind: type[nn.Module]) -> set[str]:
    """Names of the methods that a class of modelling code adds to those of nn.Module."""
    return {
        name
        for each in _own_kinds(kind)
        for name, value in vars(each).items()
        if isinstance(value, FunctionType) and not name.startswith("__")
    }


def calls_of(kind: type[nn.Module], method: str) -> Iterator[Call]:
    """Every name that a method looks up, itself or through functions of the same file.

    Other methods that it calls are not followed, nor the file's own attention function where the
    config may name another one.
    """
    first = inspect.unwrap(getattr(kind, method))
    found, waiting = {first}, [first]
    while waiting:
        function = waiting.pop()
        for name, in_module in _looked_up(function.__code__, function.__globals__):
            yield Call(name, in_module, function is first)
        for other in set(_functions_of(kind, method, function)) - found:
            found.add(other)
            waiting.append(other)


def attends_by_interface(module: nn.Module) -> bool:
    """Whether a part of the module attends through the function that its config names."""
    kinds = {type(part) for part in module.modules()}
    return any(
        call.name == _INTERFACE
        for kind in kinds
        for method in methods_of(kind)
        for call in calls_of(kind, method)
    )


def _own_kinds(kind: type[nn.Module]) -> list[type[nn.Module]]:
    return [each for each in kind.__mro__ if issubclass(each, nn.Module) and each is not nn.Module]


def _functions_of(
    kind: type[nn.Module], method: str, function: FunctionType
) -> Iterator[FunctionType]:
    """Functions of the class's file that `function` names; with super, overridden methods too."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    if "super" in names:
        for each in _own_kinds(kind):
            value = inspect.unwrap(vars(each).get(method, function))
            if isinstance(value, FunctionType):
                yield value
    for name in names:
        value = function.__globals__.get(name)
        value = inspect.unwrap(value) if callable(value) else value
        if _INTERFACE in names and name.startswith("eager_attention"):
            continue
        if isinstance(value, FunctionType) and value.__module__ == kind.__module__:
            yield value


def _looked_up(code: CodeType, names: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Each name that the code looks up, and whether it is an attribute of a Python module."""
    for each in _codes(code):
        base: Any = None  # the object that was loaded last; only modules are of interest
        for line in dis.get_instructions(each):
            if line.opname == "LOAD_GLOBAL":
                base = names.get(line.argval)
                yield line.argval, False
            elif line.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                yield line.argval, isinstance(base, ModuleType)
                base = getattr(base, line.argval, None) if isinstance(base, ModuleType) else None
            elif line.opname == "BINARY_OP" and line.argrepr.startswith("@"):
                yield "@", False
            elif line.opname not in ("PUSH_NULL", "CACHE", "PRECALL"):
                base = None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of all functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
