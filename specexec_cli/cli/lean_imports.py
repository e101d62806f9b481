"""Imports torch and transformers without the parts that no pass needs.

transformers imports torch's compiler for three decorators, distributed tensors and accelerate for
loading in its own way, and scipy for losses of object detection: two fifths of the time before a
session opens. A command's process needs none of them. What is put into their place keeps to what
transformers documents for a machine that lacks them, and only the process of a command sees it: a
program that imports specexec as a library gets all of transformers.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from platformdirs import user_cache_path

from specexec_cli.guarded import parse_json
from specexec_cli.kept import read_sealed, write_sealed

_COMPILER = "torch._dynamo"
_TOOLS = "transformers.utils.import_utils"
_LISTING = "define_import_structure"
# transformers asks once whether they are there; the last, which a folder of that name in front of
# the modules seems to be, has it read what all installed packages contain
_ABSENT = ("accelerate", "scipy", "kernels")


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
        with _without_source_lines():
            import torch

        if _COMPILER not in sys.modules:
            stack.enter_context(_in_place(_COMPILER, _Compiler()))
        stack.enter_context(_undistributed(torch.distributed))
        stack.enter_context(_models_listed_once())
        yield


def load_torch_beside() -> threading.Thread | None:
    """Has a thread load torch's largest library, while the command still imports and plans.

    Loading it takes a sixth of a second of processor time, for which Python's lock is not needed:
    `import torch` finds it loaded. Where it cannot be loaded, that import does it or says why. A
    command that ends before waits for the thread.

    Returns:
        the thread; None where none has been started.
    """
    if "torch" in sys.modules or sys.platform != "linux":
        return None
    # not by find_spec() of importlib.util, which asks hooks that may import
    found = PathFinder.find_spec("torch")
    for place in (found and found.submodule_search_locations) or []:
        library = Path(place, "lib", "libtorch_cpu.so")
        if library.is_file():
            loading = threading.Thread(target=_load, args=(library,))
            with suppress(RuntimeError):  # no more threads are allowed: it is imported as usual
                loading.start()
                return loading
    return None


def _load(library: Path) -> None:
    import ctypes

    # by a foreign call, since ctypes holds Python's lock when it loads a library itself
    with suppress(AttributeError):  # dlopen is in a library of its own before glibc 2.34
        ctypes.CDLL(None).dlopen(os.fsencode(library), os.RTLD_NOW)


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
def _without_source_lines() -> Iterator[None]:
    """Has torch note file and line of each operator that it defines, without reading the file.

    inspect finds the text of the line too, in modules of 10,000 lines, and nobody asks for it.
    """
    described = inspect.getframeinfo
    inspect.getframeinfo = lambda frame, context=0: described(frame, context)
    try:
        yield
    finally:
        inspect.getframeinfo = described


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
    """Has transformers take the names of its models from the cache folder.

    It reads 1,600 files for them at every start, which takes a quarter of a second.
    """
    if "transformers" in sys.modules:
        yield
        return
    hook = _AfterImport(_TOOLS, _list_once)
    sys.meta_path.insert(0, hook)
    try:
        import transformers  # noqa: F401

        yield
    finally:
        if hook in sys.meta_path:
            sys.meta_path.remove(hook)
        tools: Any = sys.modules.get(_TOOLS)
        listing: Any = getattr(tools, _LISTING, None)
        if hasattr(listing, "listed"):
            setattr(tools, _LISTING, listing.listed)


class _AfterImport(MetaPathFinder):
    """Has a function look at a module once it was imported, before its importer does."""

    def __init__(self, name: str, look: Callable[[Any], None]) -> None:
        self._name, self._look = name, look

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                self._look(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _list_once(tools: Any) -> None:
    """Gives transformers' module of imports a listing that looks into the cache folder first."""
    listing = getattr(tools, _LISTING, None)
    if listing is None:  # a version that does it in another way
        return
    models = Path(tools.__file__).parents[1] / "models"

    def listed(path: Any, prefix: str | None = None) -> Any:
        if Path(path) not in (models, models / "__init__.py"):
            return listing(path, prefix)
        found = _kept_names(models, lambda: listing(models))
        return {
            frozenset(needed): {
                module if prefix is None else f"{prefix}.{module}": set(names)
                for module, names in modules.items()
            }
            for needed, modules in found
        }

    listed.listed = listing  # type: ignore[attr-defined]
    setattr(tools, _LISTING, listed)


def _kept_names(models: Path, listing: Callable[[], Any]) -> list[tuple[list[str], Any]]:
    """Names by module, beside the libraries that they need, as they are kept or listed now."""
    import transformers

    state = repr((transformers.__version__, str(models), models.stat().st_mtime_ns))
    name = hashlib.sha256(state.encode()).hexdigest()[:32]
    kept = user_cache_path("specexec", appauthor=False) / "imports" / f"{name}.names"
    with suppress(ValueError):  # it is missing or damaged
        kept_names: list[tuple[list[str], Any]] = parse_json(read_sealed(kept))
        return kept_names
    found = [
        (sorted(needed), {module: sorted(names) for module, names in modules.items()})
        for needed, modules in listing().items()
    ]
    with suppress(OSError):  # works without the cache, too
        write_sealed(kept, json.dumps(found).encode())
    return found


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
