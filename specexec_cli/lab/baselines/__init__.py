"""What SpecExec is measured against: the methods of other papers, and an oracle.

Import SOURCES and POLICIES from here: those of drafting lack the baselines until this is imported.
"""

from __future__ import annotations

from importlib import import_module

from specexec_cli.drafting.policies import POLICIES
from specexec_cli.drafting.sources import SOURCES, policies_for

__all__ = ["POLICIES", "SOURCES", "policies_for"]

for _file in ("oracle", "sources"):
    import_module(f"{__name__}.{_file}")
