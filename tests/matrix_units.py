"""Products of Triton's interpreter as a GPU's matrix units compute them: one sum for each element.

The interpreter asks NumPy, whose library sums in another order for another shape, so that a row
would have other bits among other rows.
"""

from __future__ import annotations

from typing import Any

import pytest


def sum_in_order(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, each element of a product is summed over the inputs in order."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(builder: Any, a: Any, b: Any, acc: Any, *precision: Any) -> Any:
        sums = acc.data.copy()
        for place in range(a.data.shape[1]):
            left, right = (part.astype(sums.dtype) for part in (
                a.data[:, place, None], b.data[None, place]
            ))  # fmt: skip
            sums += left * right
        return TensorHandle(sums, acc.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)
