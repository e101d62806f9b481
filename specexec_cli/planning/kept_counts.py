"""Counts of the weights of models of one's own, kept in the cache folder for later processes.

To count them takes torch and transformers, which are imported in seconds. A kept count is of one
config.json, of one version of transformers, and of the code that counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from specexec_cli.catalog import weight_counts
from specexec_cli.catalog.weight_counts import WeightCounts, counts_of, table_of
from specexec_cli.guarded import parse_json
from specexec_cli.kept import installed_version, read_sealed, write_sealed


def kept_or(config_json: str, count: Callable[[str], WeightCounts], source: str) -> WeightCounts:
    """The count of a config.json that an earlier process kept, or else what `count` finds of it.

    Args:
        config_json: with sorted keys.
        source: the file of what counts.
    """
    try:
        name = hashlib.sha256(f"{_counted_by(source)}\n{config_json}".encode())
    except (OSError, ModuleNotFoundError):  # installed without sources or its own version
        return count(config_json)
    folder = user_cache_path("specexec", appauthor=False) / "counts"
    kept = folder / f"{name.hexdigest()[:32]}.json"
    # what is missing or damaged is counted anew
    with suppress(ValueError, TypeError, LookupError, AttributeError):
        return counts_of(parse_json(read_sealed(kept)))
    found = count(config_json)
    with suppress(OSError):  # works without the cache, too
        write_sealed(kept, json.dumps(table_of(found)).encode())
    return found


@cache
def _counted_by(source: str) -> str:
    """A digest of what counts: its source, and the version of transformers."""
    told = hashlib.sha256(installed_version("transformers").encode())
    for path in (source, weight_counts.__file__):
        told.update(Path(path).read_bytes())
    return told.hexdigest()
