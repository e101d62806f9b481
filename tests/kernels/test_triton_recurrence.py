"""The recurrence in Triton against PyTorch's rows, and a tree's bits against those of chains."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from specexec_kernels import recurrence
from specexec_kernels.recurrence import Order
from torch import Tensor

_PARENTS = [-1, -1, 0, 0, 1, 2, 2, 5, 4]


def inputs(state: Sequence[int], key_heads: int, decay_dims: int) -> list[Tensor]:
    """A state, queries, keys, values, decays and betas of the rows of _PARENTS."""
    made, rows = torch.Generator().manual_seed(0), len(_PARENTS)
    heads, key_dim, value_dim = state
    keys = [recurrence.unit_length(torch.randn(rows, key_heads, key_dim, generator=made))
            for _ in range(2)]  # fmt: skip
    return [
        torch.randn(heads, key_dim, value_dim, generator=made), *keys,
        torch.randn(rows, heads, value_dim, generator=made),
        torch.rand((rows, *state)[: 2 + decay_dims], generator=made),
        torch.rand((rows, heads), generator=made),
    ]  # fmt: skip


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize(
    ("state", "key_heads", "decay_dims"),
    [
        ((4, 16, 32), 2, 0), ((2, 128, 128), 1, 0), ((3, 12, 20), 3, 1), ((1, 16, 300), 1, 2),
        ((2, 6, 5), 1, 2),
    ],
)  # fmt: skip
def test_kernel(
    state: tuple[int, int, int],
    key_heads: int,
    decay_dims: int,
    corrects: bool,
    device: torch.device,
) -> None:
    from specexec_kernels import triton_recurrence

    given = inputs(state, key_heads, decay_dims)
    for order in (Order.depth_first(_PARENTS, [3, 7, 8]), Order.chain(len(_PARENTS))):
        expected = recurrence.by_rows(*given, order, corrects=corrects)
        there = [tensor.to(device) for tensor in given]
        found = triton_recurrence.recurrence(*there, order, corrects=corrects)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("corrects", [False, True])
def test_a_row_has_the_bits_of_its_path_alone(corrects: bool, device: torch.device) -> None:
    from specexec_kernels import triton_recurrence

    given = [tensor.to(device) for tensor in inputs((4, 16, 32), 2, 0)]
    order = Order.depth_first(_PARENTS, range(len(_PARENTS)))
    found, _ = triton_recurrence.recurrence(*given, order, corrects=corrects)
    for row in range(len(_PARENTS)):
        path, above = [], row
        while above >= 0:
            path.insert(0, above)
            above = _PARENTS[above]
        alone = [given[0], *(each[path] for each in given[1:])]
        expected, _ = triton_recurrence.recurrence(
            *alone, Order.chain(len(path)), corrects=corrects
        )
        assert torch.equal(found[row], expected[-1])
