"""The papers' tables, figures, algorithms and theorems as recipes: `specexec bench paper NAME`.

Each file below is the recipes of one paper; registry.py says what a recipe is.
"""

from __future__ import annotations

from importlib import import_module

from specexec_cli.lab.papers.registry import RECIPES, Claim, Finding, Recipe, Setting, Table, recipe

__all__ = ["RECIPES", "Claim", "Finding", "Recipe", "Setting", "Table", "recipe"]

# the files, in the order of the list that `specexec bench paper` prints
for _file in ("specexec_rates", "specexec_search", "disco", "dsi"):
    import_module(f"{__name__}.{_file}")
