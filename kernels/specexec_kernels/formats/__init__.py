"""Formats of row-packed weights, one file each; `base` says what a format states.

`METHODS` are the quantization methods that config files name, each of which reads one or more of
the formats.
"""

from __future__ import annotations

from collections.abc import Mapping

from specexec_kernels.formats import bitsandbytes, compressed_tensors, fp8, modelopt
from specexec_kernels.formats.base import Method

METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        fp8.METHOD,
        fp8.FBGEMM,
        modelopt.METHOD,
        compressed_tensors.METHOD,
        bitsandbytes.METHOD,
    )
}
