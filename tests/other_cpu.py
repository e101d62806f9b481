"""Has this CPU run the kernels for other CPUs, as far as its own instructions can."""

from __future__ import annotations

import pytest
from specexec_kernels import cpu_jit, cpu_matmul_plan
from specexec_kernels.cpu_ir_emit import Quads


def other_cpu(
    patch: pytest.MonkeyPatch,
    *,
    lanes: int | None = None,
    matmul: bool | None = None,
    dot: bool | None = None,
    quads: Quads | None = None,
) -> None:
    """Has kernels chosen for it; what is None is as here.

    Args:
        patch: undoes it.
        lanes: float32 lanes of its widest registers, at most those of this CPU.
        matmul: whether it has instructions that multiply in dtypes of two bytes.
        dot: whether it multiplies pairs of bfloat16, which this one must then do too.
        quads: by which instruction, which this one must have, it multiplies four bytes.
    """
    answers = ("lanes", lanes), ("has_matmul", matmul), ("has_dot", dot), ("quads", quads)
    for name, answer in answers:
        if answer is not None:
            patch.setattr(cpu_jit, name, lambda *dtype, answer=answer: answer)
    patch.setattr(cpu_matmul_plan, "_plans", {})  # those made for this one
