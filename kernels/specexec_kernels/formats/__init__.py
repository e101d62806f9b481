"""Formats of packed weights, one file each; base.py says what a format states.

`METHODS` are the quantization methods that config files name, each of which reads one or more of
the formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specexec_kernels.formats import bitsandbytes, compressed_tensors, fp8, modelopt, mxfp4
from specexec_kernels.formats.base import Method

_table: dict[str, Method] = {}
METHODS: Mapping[str, Method] = MappingProxyType(_table)


def register(method: Method) -> None:
    """Adds a method.

    Raises:
        ValueError: there is one of this name.
    """
    if method.name in _table:
        raise ValueError(f"packed weights of '{method.name}' are registered twice")
    _table[method.name] = method


for _method in (
    fp8.METHOD,
    fp8.FBGEMM,
    modelopt.METHOD,
    compressed_tensors.METHOD,
    bitsandbytes.METHOD,
    mxfp4.METHOD,
):
    register(_method)
