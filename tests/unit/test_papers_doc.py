"""docs/papers.md: no cell is empty, its commands exist, and SpecExec's printed rates are in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specexec_cli.catalog.registry import load_registry
from specexec_cli.lab.bench.paper import ROWS, PaperRow
from specexec_cli.lab.papers import RECIPES

TEXT = (Path(__file__).parents[2] / "docs" / "papers.md").read_text("utf-8")
_HEADER = "| in the paper |"


def cells() -> list[list[str]]:
    """Of the rows of the tables that have a paper's item in each, the item first."""
    found, inside = [], False
    for line in TEXT.splitlines():
        inside = line.startswith(_HEADER) or (inside and line.startswith("|"))
        if inside and not line.startswith((_HEADER, "|---")):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_no_cell_is_empty_and_what_was_not_run_names_command_and_figure() -> None:
    assert len(cells()) > 40
    for row in cells():
        assert len(row) == 5, row
        assert all(cell.strip("-") for cell in row), row
        _, command, printed, here, _ = row
        if here.startswith("not run"):
            assert re.match(r"GPU: .*-m ", command), row
            assert re.search(r"\d", printed), row


def test_its_commands_exist() -> None:
    named = set(re.findall(r"`((?:specexec|dsi|disco)-(?:[a-z]+)-[\d.]+|dsi-theorems)", TEXT))
    named |= set(re.findall(r"bench paper ((?:specexec|dsi|disco)-[a-z]+(?:-[\d.]+)?)", TEXT))
    assert named == set(RECIPES)
    pairs = set(re.findall(r"-m ([a-z0-9.-]+)", TEXT))
    assert pairs <= set(load_registry().pairs)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"table {row.table}: {row.generation_rate}")
def test_every_rate_that_specexec_prints_is_in_its_table_s_rows(row: PaperRow) -> None:
    printed = " ".join(cell[2] for cell in cells() if cell[0].startswith(f"Table {row.table}"))
    rates = {float(number) for number in re.findall(r"\d+\.\d+", printed)}
    assert row.generation_rate in rates
