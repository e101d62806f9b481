"""Options of scripts that list names."""

from __future__ import annotations

import sys
from collections.abc import Collection


def named(option: str, listed: str, known: Collection[str], between: str = ",") -> list[str]:
    """Splits an option such as `--heads mtp,eagle` into its names.

    Args:
        option: as it is written, for the message.
        between: what stands between two names.
    Raises:
        SystemExit: with status 2, behind one line with the names that there are.
    """
    names = [name.strip() for name in listed.split(between)]
    for name in names:
        if name not in known:
            there = between.join(known)
            print(f"error: {option} '{name}': the names are {there}", file=sys.stderr)
            raise SystemExit(2)
    return names
