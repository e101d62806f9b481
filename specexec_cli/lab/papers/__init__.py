"""The papers' tables, figures, algorithms and theorems as recipes: `specexec bench paper NAME`.

Each file listed below holds recipes of one paper; registry.py explains recipes.
"""

from __future__ import annotations

from importlib import import_module

from specexec_cli.lab.papers.registry import RECIPES, Claim, Finding, Recipe, Setting, Table, recipe

__all__ = ["RECIPES", "Claim", "Finding", "Recipe", "Setting", "Table", "recipe"]

# the files of recipes, in the order in which `specexec bench paper` lists them
for _file in (
    "specexec_rates",
    "specexec_speed",
    "specexec_search",
    "disco",
    "disco_latency",
    "dsi",
    "dsi_timeline",
):
    import_module(f"{__name__}.{_file}")
