"""Kernel tests run compiled on a GPU (-m gpu) and through Triton's interpreter elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from interpreter import interpret_quickly
from matrix_units import sum_in_order
from uncounted import uncounted

sys.path.insert(0, str(Path(__file__).parent))  # tests import random_weights.py by name


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernel under test runs: interpreted on the CPU, compiled on a GPU."""
    interpret_quickly()
    return torch.device(request.param)


@pytest.fixture
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter sums each element of a product in one order, as a GPU does."""
    sum_in_order(monkeypatch)


def pytest_itemcollected(item: pytest.Function) -> None:
    """No test of kernels is counted: they are a package of their own."""
    item.obj = uncounted(item.obj)
