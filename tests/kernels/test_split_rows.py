"""Attention over rows that lie in shared blocks has the bits of attention over one piece."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from specexec_kernels import cpu_attention, cpu_jit
from specexec_kernels.split_rows import BLOCK_SLOTS, NO_FRONT, SplitRows
from specexec_kernels.tree_attention import tree_mask

HEADS, KV_HEADS = 4, 2


def split(rows: torch.Tensor, blocks: int) -> SplitRows:
    """(heads, slots, dimensions) rows, the first in blocks, the others in a larger buffer."""
    first = blocks * BLOCK_SLOTS
    room = torch.full((1, rows.shape[0], rows.shape[1] + 7, rows.shape[2]), torch.nan).to(rows)
    own = room[:, :, : rows.shape[1] - first]
    own.copy_(rows[None, :, first:])
    return SplitRows(NO_FRONT.longer(rows[None, :, :first]), own)


def inputs(dtype: torch.dtype, slots: int, rows: int, head_dim: int = 32) -> list[torch.Tensor]:
    """Queries, keys and values."""
    made = torch.Generator().manual_seed(slots + rows)
    sizes = (HEADS, rows, head_dim), (KV_HEADS, slots, head_dim), (KV_HEADS, slots, head_dim)
    return [torch.randn(*size, generator=made).to(dtype) for size in sizes]


def mask_of(rows: int, slots: int, window: int | None) -> torch.Tensor:
    """A chain at the end of the slots, with every third slot of another branch."""
    own = torch.arange(slots - rows, slots)[:, None]
    at = torch.arange(slots)[None]
    seen = (at <= own) & ((at % 3 > 0) | (at == own))
    return seen if window is None else seen & (at > own - window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("blocks", "behind", "rows"), [(1, 1, 1), (2, 0, 3), (3, 77, 9)])
@pytest.mark.parametrize("window", [None, 40])
def test_the_cpu_s_kernel(
    dtype: torch.dtype, blocks: int, behind: int, rows: int, window: int | None
) -> None:
    slots = blocks * BLOCK_SLOTS + behind
    queries, keys, values = inputs(dtype, slots, rows)
    mask = mask_of(rows, slots, window)
    for options in ((None, None, None), (0.2, 3.0, torch.randn(HEADS))):
        expected = cpu_attention.attend(queries, keys, values, mask, *options)
        found = cpu_attention.attend(
            queries, split(keys, blocks), split(values, blocks), mask, *options
        )
        assert torch.equal(found, expected)


def test_heads_that_are_no_whole_vectors_are_read_in_one_piece() -> None:
    queries, keys, values = inputs(torch.float32, 2 * BLOCK_SLOTS + 5, 3, cpu_jit.lanes() + 2)
    mask = mask_of(3, keys.shape[1], None)
    found = cpu_attention.attend(queries, split(keys, 2), split(values, 2), mask)
    assert torch.equal(found, cpu_attention.attend(queries, keys, values, mask))


def test_code_that_knows_no_blocks_finds_one_piece() -> None:
    rows = torch.randn(2, 2 * BLOCK_SLOTS + 5, 4)
    found, whole = split(rows, 2), rows[None]
    assert found.shape == whole.shape
    assert torch.equal(found.transpose(1, 2), whole.transpose(1, 2))
    assert torch.equal(found[:, :, 3:], whole[:, :, 3:])
    assert torch.equal(found * 2.0, whole * 2.0)
    assert torch.equal(2.0 * found, whole * 2.0)
    assert torch.equal(torch.cat([found, found], dim=2), torch.cat([whole, whole], dim=2))
    query = torch.randn(1, 2, 3, 4)
    assert torch.equal(query @ found.mT, query @ whole.mT)
    square = torch.randn(4, 4)
    assert torch.equal(found @ square, whole @ square)
    assert torch.equal((1.0 + found) / 2.0 - found, (1.0 + whole) / 2.0 - whole)


def test_a_copy_has_the_rows_of_what_was_copied() -> None:
    rows = torch.randn(2, BLOCK_SLOTS + 5, 4)
    found = copy.copy(split(rows, 1))
    assert torch.equal(found.whole, rows[None])
    half_made = SplitRows.__new__(SplitRows)
    for name in ("front", "own", "whole", "dtype"):
        assert not hasattr(half_made, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("first", [0, 70])
def test_the_gpu_s_kernel(
    dtype: torch.dtype, head_dim: int, first: int, device: torch.device, matrix_units: None
) -> None:
    """A chain, and a tree whose last blocks are gathered, behind two blocks and some rows."""
    from specexec_kernels.triton_tree_attention import tree_attention

    slots, nodes = 2 * BLOCK_SLOTS + 45, 7
    queries, keys, values = (each.to(device) for each in inputs(dtype, slots + nodes, 5, head_dim))
    tree = torch.eye(nodes, dtype=torch.bool)
    tree[:, 0] = True
    tree[4, 2] = tree[5, 2] = tree[5, 4] = True
    own = np.arange(slots - 5, slots)
    none = np.zeros((0, 0), dtype=bool)
    for mask, seen in (
        (tree_mask(own, none, slots, first), slots),
        (tree_mask(own[:0], tree.numpy()[-5:], slots, first), slots + nodes),
    ):
        of = dataclasses.replace(mask, table=mask.table.to(device))
        rows = keys[:, :seen].contiguous(), values[:, :seen].contiguous()
        query = queries.transpose(0, 1).contiguous()
        expected = tree_attention(query, *rows, of)
        found = tree_attention(query, *(split(each, 2) for each in rows), of)
        assert torch.equal(found, expected)
