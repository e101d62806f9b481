"""Keys and values in 8 bits: what comes back is near, and the kernel's bits are PyTorch's."""

from __future__ import annotations

import pytest
import torch
from other_cpu import other_cpu
from specexec_kernels import cpu_eight_bit_kv, cpu_jit
from specexec_kernels.eight_bit_kv import packed, unpack, unpack_ref, unpacked_size
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def some_rows(size: int, count: int = 77) -> Tensor:
    """Usual rows, and at 3, 4 and 5 zeros, a giant and a dwarf."""
    rows = torch.randn(1, 3, count, size, generator=torch.Generator().manual_seed(size))
    rows[0, 0, 3], rows[0, 1, 4, 0], rows[0, 1, 5] = 0.0, 1e30, 1e-30
    return rows


@pytest.mark.parametrize("size", [8, 12, 32, 64, 80, 128, 33])
def test_a_number_is_off_by_half_a_step_of_its_scale(size: int) -> None:
    rows = some_rows(size)
    kept, found = packed(rows), torch.empty_like(rows)
    assert unpacked_size(kept.shape[-1]) == size
    assert kept.shape[-1] == size + 2 * -(-size // 32)
    unpack(kept, found)
    assert torch.isfinite(found).all()
    for start in range(0, size, 32):
        block, near = rows[0, :, 6:, start : start + 32], found[0, :, 6:, start : start + 32]
        steps = block.abs().amax(-1, keepdim=True) / 127
        assert ((near - block).abs() <= 0.57 * steps).all()  # a scale in float16 is off by 2**-11
    assert torch.equal(found[0, 0, 3], torch.zeros(size))


@pytest.mark.parametrize("size", [12, 64])
def test_a_row_s_bits_are_its_own(size: int) -> None:
    rows = some_rows(size)
    turned = rows.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(packed(turned[:, :, 5:20]), packed(rows)[:, :, 5:20])
    kept, found = packed(rows), torch.empty_like(rows)
    unpack(kept, found)
    for start, stop in ((0, 1), (3, 70), (76, 77)):
        part = torch.empty_like(rows[:, :, start:stop])
        unpack(kept[:, :, start:stop], part)
        assert torch.equal(part, found[:, :, start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 128, 80])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_the_kernel_s_bits_are_those_of_pytorch(
    size: int, dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In buffers with more slots than rows, of which the others are left alone."""
    if lanes > cpu_jit.lanes():
        pytest.skip("no registers of that width")
    other_cpu(monkeypatch, lanes=lanes)
    kept = torch.zeros(1, 3, 200, size + 2 * -(-size // 32), dtype=torch.uint8)
    kept[:, :, :130] = packed(some_rows(size, 130))
    found, expected = (torch.full((1, 3, 150, size), 7.0, dtype=dtype) for _ in range(2))
    compiled = cpu_eight_bit_kv.supports(kept[:, :, :130], found[:, :, :130])
    assert compiled == (size != 80 and dtype != torch.float16)
    unpack(kept[:, :, :130], found[:, :, :130])
    unpack_ref(kept[:, :, :130], expected[:, :, :130])
    assert torch.equal(found, expected)


def test_no_rows_at_all() -> None:
    none = torch.empty(1, 3, 0, 64)
    unpack(packed(none), none)
