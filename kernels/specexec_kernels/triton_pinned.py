# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Reads pinned memory of the CPU from a kernel, past the GPU's copy engine.

The engine takes copies in the order in which it got them, so a small upload waits for the weights
that are on their way. A kernel has its own way over the link: pinned memory has an address on the
GPU too, the same one (CUDA programming guide, unified virtual addressing).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # words of 8 bytes that a program copies


@triton.jit(do_not_specialize=["n_bytes"])
def _read_kernel(target, source, n_bytes, BLOCK: tl.constexpr):
    # .cv: what the CPU has written since the last launch is not in any cache
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < n_bytes // 8
    words = source.to(tl.pointer_type(tl.int64))
    found = tl.load(words + word, mask=inside, cache_modifier=".cv")
    tl.store(target.to(tl.pointer_type(tl.int64)) + word, found, mask=inside)
    if tl.program_id(0) == 0:  # the bytes behind the last word
        byte = n_bytes // 8 * 8 + tl.arange(0, 8)
        rest = tl.load(source + byte, mask=byte < n_bytes, cache_modifier=".cv")
        tl.store(target + byte, rest, mask=byte < n_bytes)


def read_pinned(target: Tensor, source: Tensor) -> None:
    """Copies pinned memory to the device, in the order of the kernels of the current stream.

    Args:
        target: (bytes,) uint8 on the device, aligned to 8 bytes.
        source: (bytes,) uint8 on the CPU, pinned, aligned to 8 bytes. It must stay, and stay as it
            is, until the kernel has run: torch does not know that it is read.
    """
    n_bytes = source.numel()
    _read_kernel[(triton.cdiv(n_bytes, 8 * _BLOCK),)](
        target, source, n_bytes, BLOCK=_BLOCK, enable_fp_fusion=True
    )
