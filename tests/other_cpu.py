"""Has this CPU run the kernels for other CPUs, as far as its own instructions can."""

from __future__ import annotations

import pytest
from specexec_kernels import cpu_jit, cpu_matmul_plan


def other_cpu(
    patch: pytest.MonkeyPatch,
    *,
    lanes: int | None = None,
    matmul: bool | None = None,
    dot: bool | None = None,
) -> None:
    """Has kernels chosen for it; what is None is as here.

    Args:
        patch: undoes it.
        lanes: float32 lanes of its widest registers, at most those of this CPU.
        matmul: whether it has instructions that multiply in dtypes of two bytes.
        dot: whether it multiplies pairs of bfloat16, which this one must then do too.
    """
    for name, answer in (("lanes", lanes), ("has_matmul", matmul), ("has_dot", dot)):
        if answer is not None:
            patch.setattr(cpu_jit, name, lambda *dtype, answer=answer: answer)
    patch.setattr(cpu_matmul_plan, "_plans", {})  # those made for this one
