"""Attention against double precision, and a row's bits being its own."""

from __future__ import annotations

import pytest
import torch
from specexec_kernels import cpu_attention, cpu_jit
from torch import Tensor

HEAD_DIMS = (16, 32, 64, 128, 256)
# heads, key/value heads, rows, slots
SHAPES = ((8, 4, 1, 37), (8, 8, 5, 64), (4, 1, 20, 101), (6, 2, 3, 17))
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def inputs(
    dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, rows: int, slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, and views of a larger cache's keys and values; a mask that hides some slots."""
    generator = torch.Generator().manual_seed(head_dim + rows)
    queries = torch.randn(heads, rows, head_dim, generator=generator).to(dtype)
    keys, values = (
        torch.randn(kv_heads, slots + 30, head_dim, generator=generator).to(dtype)[:, :slots]
        for _ in range(2)
    )
    mask = torch.rand(rows, slots, generator=generator) < 0.7
    mask[:, 0] = True
    return queries, keys, values, mask


def exact(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    group = queries.shape[0] // keys.shape[0]
    scores = queries.double() @ keys.double().repeat_interleave(group, 0).transpose(1, 2) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ values.double().repeat_interleave(group, 0)).transpose(0, 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_against_double_precision(dtype: torch.dtype, head_dim: int) -> None:
    for shape in SHAPES:
        queries, keys, values, mask = inputs(dtype, head_dim, *shape)
        assert cpu_attention.supports(keys, values)
        for scale in (None, 0.2):
            found = cpu_attention.attend(queries, keys, values, mask, scale)
            expected = exact(queries, keys, values, mask, scale or head_dim**-0.5)
            assert found.dtype == dtype
            error = (found.double() - expected).abs().max()
            assert error <= TOLERANCE[dtype] * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_alone_and_without_what_it_does_not_see_has_the_same_bits(
    dtype: torch.dtype,
) -> None:
    for shape in SHAPES:
        queries, keys, values, mask = inputs(dtype, 64, *shape)
        together = cpu_attention.attend(queries, keys, values, mask)
        for row in range(shape[2]):
            seen = mask[row]
            one = queries[:, row : row + 1]
            alone = cpu_attention.attend(one, keys[:, seen], values[:, seen], seen[None, seen])
            assert torch.equal(alone[0], together[row])


def test_same_bits_on_any_number_of_threads() -> None:
    arguments = inputs(torch.float32, 64, 8, 4, 30, 90)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(cpu_attention.attend(*arguments))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("lanes", [4, 8])
def test_narrower_vector_registers(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_jit, "lanes", lambda: lanes)
    queries, keys, values, mask = inputs(torch.bfloat16, 128, 8, 2, 9, 43)
    found = cpu_attention.attend(queries, keys, values, mask)
    expected = exact(queries, keys, values, mask, 128**-0.5)
    assert (found.double() - expected).abs().max() <= 1.6e-2


@pytest.mark.parametrize("lanes", [4, 8, cpu_jit.lanes()])
def test_nothing_is_read_behind_what_any_row_of_a_tile_sees(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt's chunks: each row sees the prefix and the rows before it."""
    monkeypatch.setattr(cpu_jit, "lanes", lambda: lanes)
    rows, prefix, slots = 40, 61, 61 + 40 + 2 * lanes
    queries, keys, values, _ = inputs(torch.float32, 32, 8, 4, rows, slots)
    mask = torch.arange(slots) <= prefix + torch.arange(rows)[:, None]
    shown = [part[:, : prefix + rows] for part in (keys, values)]
    expected = cpu_attention.attend(queries, *shown, mask[:, : prefix + rows])
    for part in (keys, values):
        part[:, prefix + rows + lanes :] = torch.nan  # zero times which would be none
    assert torch.equal(cpu_attention.attend(queries, keys, values, mask), expected)


def test_scores_far_apart() -> None:
    """The exponential of what is far below the largest score is zero, of the largest one."""
    queries, keys, values, mask = inputs(torch.float32, 16, 2, 1, 4, 40)
    found = cpu_attention.attend(queries * 1e4, keys, values, torch.ones_like(mask))
    best = (queries @ keys.transpose(1, 2)).argmax(-1)  # (heads, rows)
    assert torch.equal(found, values[0][best].transpose(0, 1))


def test_what_is_not_supported() -> None:
    keys = torch.zeros(2, 8, 16)
    assert cpu_attention.supports(keys, keys)
    assert not cpu_attention.supports(keys.double(), keys.double())
    assert not cpu_attention.supports(keys, keys.half())
    assert not cpu_attention.supports(keys[..., :2], keys[..., :2])
    assert not cpu_attention.supports(keys, torch.zeros(2, 16, 16)[:, ::2])
    assert not cpu_attention.supports(keys.to("meta"), keys.to("meta"))
    wide = torch.zeros(1, 2, 32 * cpu_jit.lanes() * 2)
    assert not cpu_attention.supports(wide, wide)
