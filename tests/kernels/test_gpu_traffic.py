"""What products with packed weights move on a GPU, and how near they come: by the interpreter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from interpreter import interpret_quickly
from random_weights import any_weight
from specexec_kernels.formats.base import PackedWeight
from torch import Tensor

MOST = 1.2  # bytes read for each packed one, with one row
OUTPUTS, INPUTS = 64, 256  # one block of outputs
EXPERTS, CHOSEN = 4, 2
READ = (
    "fp8-block", "mxfp4", "nvfp4", "int4-zeros", "int8", "nf4", "gptq-3", "gptq-4",
    "gptq-4-shuffled", "awq", "Q4_0", "Q8_0", "Q4_K", "Q6_K",
)  # fmt: skip
# (format, inputs that are stepped through by 16, 32, 64 or 128, outputs that fill no block, dtype)
ODD = [
    ("int8", 144, 37, torch.float16), ("gptq-4-shuffled", 192, 40, torch.bfloat16),
    ("awq", 192, 72, torch.float16), ("gptq-3", 96, 40, torch.bfloat16),
    ("Q8_0", 96, 33, torch.float16), ("Q4_K", 256, 65, torch.bfloat16),
    ("mxfp4", 96, 5, torch.float32),
]  # fmt: skip
FEWER = (1, 16, 17, 33, 65, 128)


@dataclass
class Traffic:
    """Bytes of the watched tensors that programs read, by program; and bytes stored anywhere."""

    parts: dict[tuple[int, ...], list[Any]] = field(default_factory=lambda: defaultdict(list))
    stored: int = 0

    @property
    def read(self) -> int:
        """Each byte once for every program that asks for it."""
        return sum(np.unique(np.concatenate(each)).size for each in self.parts.values())


@contextmanager
def watched(tensors: Sequence[Tensor]) -> Iterator[Traffic]:
    """Notes what the interpreter's programs read of the tensors, and what they store."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    found = Traffic()
    spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
    load, store = Builder.create_masked_load, Builder.create_masked_store

    def item_bytes(pointers: Any) -> int:
        return max(8, pointers.get_element_ty().primitive_bitwidth) // 8

    def noted_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        asked = np.unique(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])
        ours = np.zeros(asked.shape, dtype=bool)
        for low, high in spans:
            ours |= (asked >= low) & (asked < high)
        each = asked[ours][:, None] + np.arange(item_bytes(pointers), dtype=asked.dtype)
        found.parts[tuple(self.grid_idx)].append(each.ravel())
        return load(self, pointers, mask, *others)

    def noted_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        found.stored += item_bytes(pointers) * int(np.count_nonzero(mask.data))
        return store(self, pointers, value, mask, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Builder, "create_masked_load", noted_load)
        patch.setattr(Builder, "create_masked_store", noted_store)
        yield found


def staying(packed: PackedWeight) -> PackedWeight:
    """As it lies where it stays on a GPU."""
    form = packed.format.staying(packed.in_features)
    if form is None:
        return packed
    return replace(packed, format=form, tensors=packed.format.rearrange(packed.matrices()))


def packed_bytes(weight: PackedWeight) -> int:
    return sum(each.nbytes for each in weight.tensors.values())


@pytest.mark.parametrize("name", READ)
def test_one_row_reads_packed_bytes_and_writes_no_weights(name: str) -> None:
    """As the weight is stored, and as it lies where it stays."""
    from specexec_kernels import triton_rows

    interpret_quickly()
    stored = any_weight(name, OUTPUTS, 2048 if name == "Q6_K" else INPUTS)
    x = torch.ones(1, stored.in_features).half()
    cuts = triton_rows.cuts_of(OUTPUTS, stored.in_features)  # whose sums are stored apart
    for weight in (stored, staying(stored)):
        with watched(list(weight.tensors.values())) as found:
            triton_rows.quantized_matmul(x, weight, torch.float32)
        assert 0.9 * packed_bytes(weight) < found.read <= MOST * packed_bytes(weight)
        assert 4 * OUTPUTS <= found.stored <= 4 * OUTPUTS * (1 + 2 * cuts)


def test_a_prompt_unpacks_a_weight_once_for_all_its_rows() -> None:
    from specexec_kernels import triton_rows

    interpret_quickly()
    weight, rows = any_weight("gptq-4", OUTPUTS, INPUTS), triton_rows.UNPACKED_ROWS
    with watched(list(weight.tensors.values())) as found:
        triton_rows.quantized_matmul(torch.ones(rows, INPUTS).half(), weight)
    assert 0.9 * packed_bytes(weight) < found.read <= MOST * packed_bytes(weight)
    assert found.stored == 2 * OUTPUTS * INPUTS + 2 * rows * OUTPUTS


def test_a_row_reads_the_packed_bytes_of_its_experts_alone() -> None:
    from specexec_kernels import triton_experts

    interpret_quickly()
    own = [any_weight("gptq-4", OUTPUTS, INPUTS) for _ in range(EXPERTS)]
    table = triton_experts.table_of([[each] for each in own], [[None]] * EXPERTS)
    assert table is not None
    routes = triton_experts.routes(torch.tensor([[2, 0]]), EXPERTS, torch.float16)
    tensors = [tensor for each in own for tensor in each.tensors.values()]
    with watched(tensors) as found:
        triton_experts.products(torch.ones(1, INPUTS).half(), table, routes, CHOSEN, CHOSEN)
    packed, outputs = CHOSEN * packed_bytes(own[0]), CHOSEN * OUTPUTS
    assert 0.9 * packed < found.read <= MOST * packed
    assert found.stored == 2 * outputs  # in two bytes each: no weight, and no part of a sum


@pytest.mark.parametrize(("name", "inputs", "outputs", "dtype"), ODD)
def test_odd_shapes_are_as_near_as_pytorch_with_own_bits_for_every_row(
    name: str, inputs: int, outputs: int, dtype: torch.dtype, matrix_units: None
) -> None:
    """Errors are root mean squares over 129 rows, at most twice PyTorch's of the same numbers."""
    from specexec_kernels import triton_rows

    interpret_quickly()
    weight = any_weight(name, outputs, inputs)
    x = torch.randn(129, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    dense = triton_rows.unpack(weight, dtype)
    exact = x.double() @ dense.double().T

    def error(found: Tensor) -> float:
        return float((found.double() - exact).square().mean().sqrt())

    found = triton_rows.quantized_matmul(x, weight, torch.float32)
    assert error(found) <= 2 * error(x.float() @ dense.float().T)
    assert error(triton_rows.quantized_matmul(x, weight)) <= 2 * error(x @ dense.T)
    for rows in FEWER:
        fewer = triton_rows.quantized_matmul(x[:rows], weight, torch.float32)
        assert torch.equal(fewer, found[:rows]), rows
