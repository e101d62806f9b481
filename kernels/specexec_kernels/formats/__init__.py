"""Formats of packed weights, one file each; base.py says what a format states.

`METHODS` maps the quantization methods that config files name to what reads their weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from specexec_kernels.formats.base import Method

_table: dict[str, Method] = {}
METHODS: Mapping[str, Method] = MappingProxyType(_table)


def register(method: Method) -> None:
    """Adds a method to METHODS.

    Raises:
        ValueError: there is a method of this name already.
    """
    if method.name in _table:
        raise ValueError(f"packed weights of '{method.name}' are registered twice")
    _table[method.name] = method


# Every module of this package is imported, to register its methods. These come first, in the order
# in which an error lists what is supported.
_FIRST = ("fp8", "modelopt", "compressed_tensors", "bitsandbytes", "mxfp4")
for _file in dict.fromkeys((*_FIRST, *(each.name for each in iter_modules(__path__)))):
    import_module(f"{__name__}.{_file}")
