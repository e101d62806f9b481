"""Products of Triton's interpreter as a GPU's matrix units compute them: one sum for each element.

The interpreter asks NumPy, whose library sums in another order for another shape, so that a row
would have other bits among other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

_PRODUCTS = 1 << 15  # that are computed at once


def sum_in_order(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, each element of a product is summed over the inputs in order."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def numbers(part: Any, dtype: np.dtype[Any]) -> Any:
        if part.dtype.scalar.is_bf16():  # whose bits the interpreter keeps as integers
            return (part.data.astype(np.uint32) << 16).view(np.float32).astype(dtype, copy=False)
        return part.data.astype(dtype)

    def create_dot(builder: Any, a: Any, b: Any, acc: Any, *precision: Any) -> Any:
        sums = acc.data.copy()
        left, right = (numbers(part, sums.dtype) for part in (a, b))
        # NumPy sums the first of several axes in order, and in pairs where there is one alone
        most = max(1, _PRODUCTS // sums.size) if sums.size > 1 else 1
        for start in range(0, left.shape[1], most):
            each = slice(start, start + most)
            products = np.multiply(left.T[each, :, None], right[each, None], order="C")
            products[0] += sums
            np.add.reduce(products, axis=0, out=sums)
        return TensorHandle(sums, acc.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)
