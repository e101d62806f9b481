"""Kernels of a GPU in Triton's interpreter, which is kept from doing the same work again.

conftest.py of the kernels imports this before it is known whether Triton is to interpret, so that
nothing here may import Triton sooner than a test does.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


@cache
def builtins_are_looked_up_once() -> None:
    """Names of Triton's operations are looked up once, and not at every call inside a kernel.

    Such a call has the interpreter replace all operations by its own, for which it goes through
    every member of five modules: a fifth of a kernel's time. Which names are operations does not
    change. It stays so until the process ends.
    """
    if find_spec("triton") is None:
        return
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def operations(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in operations(package):
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def kernels_of_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Every device counts as one that Triton compiles for."""
    from specexec_kernels import dispatch

    builtins_are_looked_up_once()
    patch.setattr(dispatch, "uses_triton", lambda device: True)


def only_kernels_attend(patch: pytest.MonkeyPatch, attention: ModuleType) -> None:
    """As on a GPU, and what computes attention by PyTorch's operations is gone.

    Args:
        attention: models/attention.py, which tests of the kernels alone must not import by this.
    """
    kernels_of_a_gpu(patch)
    for name in ("_dense_attention", "_grouped", "_split"):
        patch.delattr(attention, name)
