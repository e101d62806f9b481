"""What a pass takes on a GPU without Triton, by the operations that unpacking really starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specexec_kernels.formats.awq import Awq
from specexec_kernels.formats.base import PackedFormat, PackedWeight
from specexec_kernels.formats.gptq import Gptq
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specexec_cli.planning.pass_time import UNPACK_BYTES, UNPACK_OPERATIONS, UNPACKED_AT_ONCE

_DTYPES = {"I32": torch.int32, "F16": torch.float16}
_INPUTS = 8192


class _Counted(TorchDispatchMode):
    """Counts the operations that compute, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.n_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [each for each in args if isinstance(each, Tensor)]
        if not func.is_view and "empty" not in str(func) and "reshape" not in str(func):
            self.operations += 1
            self.n_bytes += sum(each.nbytes for each in [*given, found])
        return found


@pytest.mark.parametrize(
    "packed", [Awq(group=128), Gptq(bits=4, group=128, scale_dtype="F16", stored_minus_one=True)]
)
def test_unpacking_takes_about_what_a_plan_counts(packed: PackedFormat) -> None:
    outputs = 2 * UNPACKED_AT_ONCE // _INPUTS
    tensors = {
        part.leaf: torch.zeros(part.shape(outputs, _INPUTS), dtype=_DTYPES[part.dtype])
        for part in packed.parts
    }
    with _Counted() as counted:
        PackedWeight(packed, _INPUTS, outputs, tensors).unpack_to(torch.float16)
    assert 0.5 <= counted.operations / 2 / UNPACK_OPERATIONS <= 2
    assert 0.5 <= counted.n_bytes / (outputs * _INPUTS) / UNPACK_BYTES < 2
