"""How large the next draft tree should be: one file per policy; registry.py says what one is."""

from __future__ import annotations

from importlib import import_module

from specexec_cli.drafting.policies.registry import (
    POLICIES,
    BudgetPolicy,
    NextTree,
    PolicyEntry,
    policies_for,
    policy,
)

__all__ = ["POLICIES", "BudgetPolicy", "NextTree", "PolicyEntry", "policies_for", "policy"]

# the files, in the order of help texts and error lines
for _file in ("fixed", "heuristic", "disco", "cost", "oracle"):
    import_module(f"{__name__}.{_file}")
