"""Starts a Triton kernel; one that is known already without Triton's own search for it.

That search takes longer than many a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_KNOWN: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor],
    free: Sequence[int],
    fixed: Sequence[float],
    constants: dict[str, Any],
    *,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """Starts a kernel whose parameters are tensors, numbers and constants, in this order.

    No multiplication is fused with an addition.

    Args:
        grid: programs, in up to three dimensions.
        free: numbers that the kernel is not compiled for; it names them in `do_not_specialize`.
        fixed: numbers that it may be compiled for.
        constants: by name, in the order of the kernel's parameters.
    """
    # all that Triton compiles for: constants, numbers, dtypes, whether addresses are multiples of
    # 16, and the GPU
    key = (
        kernel, warps, stages, *constants.values(), *fixed, *[each.dtype for each in tensors],
        *[each.data_ptr() % 16 == 0 for each in tensors], tensors[0].device,
    )  # fmt: skip
    known = _KNOWN.get(key)
    if known is not None:
        of_three = (*grid, 1, 1)[:3]  # a compiled kernel asks for three dimensions
        known[of_three](*tensors, *free, *fixed, *constants.values())
        return
    compiled = kernel[grid](
        *tensors, *free, *fixed, **constants, num_warps=warps, num_stages=stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    if compiled is not None:  # the interpreter compiles nothing
        _KNOWN[key] = compiled
