"""Faults on demand: an allocation that fails, or an exception before a line of the package.

Each is told by its site and by how many times the site was reached before, so that a run to be
broken can be recorded first. Threads change nothing: both look at the thread that entered alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Protocol, TypeVar

import specexec_kernels
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specexec_cli

# The kernels are those that are installed, which need not lie beside the tests.
_PACKAGE = tuple(f"{Path(*package.__path__)}/" for package in (specexec_cli, specexec_kernels))

Site = tuple[str, int, str]  # file, line, and PyTorch's operation or nothing
Point = tuple[Site, int]  # a site, and how many times it was reached before


class Fault(Protocol):
    """Breaks what runs inside the `with` once, at a point; None breaks nothing."""

    sites: list[Site]  # reached so far
    fired: bool

    def __enter__(self) -> Any: ...

    def __exit__(self, *args: Any) -> Any: ...


F = TypeVar("F", bound="_At")


class _At:
    def __init__(self, point: Point | None) -> None:
        self.sites: list[Site] = []
        self.fired = False
        self._point = point
        self._seen = 0

    def _may_be(self, operation: str) -> bool:
        """Whether a site of this operation is to be looked at: all are, or one until it came."""
        if self._point is None:
            return True
        return not self.fired and operation == self._point[0][2]

    def _reached(self, site: Site) -> bool:
        """Whether this is the point."""
        self.sites.append(site)
        if self._point is None or self.fired or site != self._point[0]:
            return False
        self._seen += 1
        self.fired = self._seen > self._point[1]
        return self.fired


class NoMemory(_At, TorchDispatchMode):
    """The allocation at the point fails as PyTorch's do: on a GPU, or on the CPU."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and PyTorch's guard takes as long as many an operation."""
        return False

    def __init__(self, point: Point | None = None) -> None:
        TorchDispatchMode.__init__(self)
        _At.__init__(self, point)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = _allocation(func)
        asked = bool(operation) and not _on_meta(args, kwargs) and self._may_be(operation)
        if asked and self._reached(_site(sys._getframe(1), operation)):
            raise _shortage(args, kwargs)
        return func(*args, **kwargs)


@cache
def _allocation(func: Any) -> str:
    """PyTorch's operation, if what comes back is new and no view or argument; else nothing."""
    returns = func._schema.returns
    new = any(str(each.type).startswith("Tensor") and each.alias_info is None for each in returns)
    return str(func) if new else ""


def _on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what comes back has no memory at all."""
    return _device(args, kwargs).type == "meta"


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    given = [value.device for value in args if isinstance(value, torch.Tensor)]
    return torch.device(kwargs.get("device") or (given[0] if given else "cpu"))


def _shortage(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RuntimeError:
    if _device(args, kwargs).type == "cuda":
        return torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of ..."
        )
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 20971520 bytes. Error code 12 (Cannot allocate memory)"
    )


class Interruption(_At):
    """An exception in the place of the line at the point, as Ctrl-C would raise."""

    def __init__(
        self, point: Point | None = None, error: type[BaseException] = KeyboardInterrupt
    ) -> None:
        super().__init__(point)
        self._error = error
        # a tracer costs most where it looks at lines: those of code that holds the point will do
        within = _PACKAGE if point is None else (point[0][0],)
        self._files = (*within, contextlib.__file__)

    def __enter__(self) -> Interruption:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_filename.startswith(self._files) and any(map(self._may_be, _beginnings(code))):
            return self._line
        return None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        line = str(frame.f_lineno)
        if event == "line" and self._may_be(line):
            begins = frame.f_lasti == _beginnings(frame.f_code)[line]
            if begins and self._reached(_site(frame, line)):
                raise self._error
        return self._line


@cache
def _beginnings(code: CodeType) -> dict[str, int]:
    """Where each line begins, by its number as sites tell it.

    A `with` reports its line once more before it leaves the context. Nothing but a tracer can raise
    there: signals wait until the context has been left.
    """
    found: dict[str, int] = {}
    for start, _, line in code.co_lines():
        if line is not None:
            found[str(line)] = min(start, found.get(str(line), start))
    return found


def _site(frame: FrameType | None, operation: str) -> Site:
    """The line of the package that this comes from."""
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    assert frame is not None
    return frame.f_code.co_filename, frame.f_lineno, operation


def points(sites: Sequence[Site]) -> list[Point]:
    """Every site where it was reached first and last; where buffers are allocated, every time."""
    counts = Counter(sites)
    return [
        (site, turn)
        for site, count in counts.items()
        for turn in (range(count) if "aten.empty" in site[2] else sorted({0, count - 1}))
    ]
