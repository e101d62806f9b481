"""Where draft trees come from: every file here is read; registry.py says what a source is."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from specexec_cli.drafting.sources.registry import (
    SOURCES,
    DraftSetup,
    DraftSource,
    draft_source,
    policies_for,
)

__all__ = ["SOURCES", "DraftSetup", "DraftSource", "draft_source", "policies_for"]

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
