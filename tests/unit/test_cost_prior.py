"""The cost of rows is measured at numbers of rows that cost differently."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from specexec_cli.session import cost_prior

BLOCK_S = 0.4  # of a product


@pytest.mark.parametrize(("block_rows", "row_s"), [(None, 0.004), (128, BLOCK_S / 128)])
def test_a_row_costs_its_share_also_where_products_come_in_blocks(
    block_rows: int | None, row_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(4, 4)
    linear.block_rows = block_rows  # type: ignore[assignment]

    def products_s(
        model: object, linear: object, tensors: object, counts: tuple[int, int]
    ) -> tuple[float, float]:
        def product_s(rows: int) -> float:
            if block_rows is None:
                return 0.1 + 0.004 * rows
            return BLOCK_S * math.ceil(rows / block_rows)

        return product_s(counts[0]), product_s(counts[1])

    monkeypatch.setattr(cost_prior, "_sample", lambda model: (linear, {}))
    monkeypatch.setattr(cost_prior, "_weights", lambda sizes: 16)
    monkeypatch.setattr(cost_prior, "_products_s", products_s)
    first_s, found_s = cost_prior._arithmetic(
        SimpleNamespace(device=torch.device("cuda" if block_rows else "cpu")),  # type: ignore[arg-type]
        None, 1, lambda: pytest.fail("slow enough"),  # type: ignore[arg-type]
    )  # fmt: skip
    assert found_s == pytest.approx(row_s)
    assert 0.0 < first_s < 0.105
