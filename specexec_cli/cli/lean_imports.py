"""Imports torch and transformers without the parts that no pass needs.

transformers imports torch's compiler for three decorators, distributed tensors and accelerate for
loading in its own way, and scipy for losses of object detection: two fifths of the time before a
session opens. A command's process needs none of them. What is put into their place keeps to what
transformers documents for a machine that lacks them, and only the process of a command sees it: a
program that imports specexec as a library gets all of transformers.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_LISTING = "create_import_structure_from_path"
_ABSENT = ("accelerate", "scipy")  # transformers asks once whether they are there


@contextmanager
def lean_imports() -> Iterator[None]:
    """While it is open, the first import of torch and transformers leaves these parts out.

    It does nothing in a process that has imported torch.
    """
    if "torch" in sys.modules:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_uncollected())
        for name in _ABSENT:
            if name not in sys.modules:
                stack.enter_context(_in_place(name, None))
        import torch

        if _COMPILER not in sys.modules:
            stack.enter_context(_in_place(_COMPILER, _Compiler()))
        stack.enter_context(_undistributed(torch.distributed))
        stack.enter_context(_models_listed_once())
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    """Looks for no garbage while modules are imported, and never among what they made.

    A fifth of the time of importing torch and transformers goes into collections that find nothing,
    since what a module makes stays. It is for imports alone: a model that has been closed is freed
    by a collection, unless it was frozen.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _in_place(name: str, module: ModuleType | None) -> Iterator[None]:
    """Has imports of `name` find `module`; None stands for a module that is not installed."""
    sys.modules[name] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        if sys.modules.get(name) is module:
            _forget(name)


def _forget(package: str) -> None:
    """Has later imports of a package and what lies in it begin anew."""
    for name in [each for each in sys.modules if f"{each}.".startswith(f"{package}.")]:
        del sys.modules[name]


@contextmanager
def _undistributed(distributed: Any) -> Iterator[None]:
    """Has torch say that it was built without its distributed part, as some builds are."""
    available = distributed.is_available
    distributed.is_available = lambda: False
    try:
        yield
    finally:
        distributed.is_available = available


@contextmanager
def _models_listed_once() -> Iterator[None]:
    """Has transformers read the 1,600 files of its models for their names once and not twice.

    Its own cache of the result tells `models` from `models/__init__.py`, the same folder.
    """
    import transformers

    tools, folder = transformers.utils.import_utils, Path(transformers.__file__).parent / "models"
    listing = getattr(tools, _LISTING, None)
    if listing is None:  # a version that does it in another way
        yield
        return
    package = str(folder / "__init__.py")
    setattr(tools, _LISTING, lambda path: listing(folder if str(path) == package else path))
    try:
        yield
    finally:
        setattr(tools, _LISTING, listing)


class _Compiler(ModuleType):
    """Stands in for torch's compiler while functions are marked as not to be compiled.

    Nothing is compiled by it in a command's process, so the marks may be missing. Anything else
    that is asked of the compiler comes from the real one, which is imported then.
    """

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        spec = importlib.util.find_spec(_COMPILER)
        # its submodules are the real ones
        self.__path__ = (spec and spec.submodule_search_locations) or []

    def __getattr__(self, name: str) -> Any:
        if name in ("disable", "allow_in_graph", "assume_constant_result"):
            return _unmarked
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            _forget(_COMPILER)
        return getattr(importlib.import_module(_COMPILER), name)


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **options: Any) -> Any:
    """A decorator, with or without options, that leaves functions as they are."""
    return function if function is not None else lambda function: function
