"""How large the next draft tree should be: one file per policy; registry.py says what one is."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from specexec_cli.drafting.policies.registry import (
    POLICIES,
    BudgetPolicy,
    NextTree,
    PolicyEntry,
    policy,
)

__all__ = ["POLICIES", "BudgetPolicy", "NextTree", "PolicyEntry", "policy"]

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
