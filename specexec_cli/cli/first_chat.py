"""Offers a larger model, once, to `specexec chat` on a machine that only has the demo pair."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path

from platformdirs import user_state_path

from specexec_cli.catalog.downloads import missing
from specexec_cli.catalog.registry import load_registry
from specexec_cli.cli.fetching import said_yes, someone_is_there
from specexec_cli.cli.models import described
from specexec_cli.planning.alternatives import fits, recommended
from specexec_cli.planning.machine import described_site


def offered_pair() -> str | None:
    """The pair to chat with instead of the demo; None if none was offered or it was declined.

    The offer is made only once: a file in the state folder records it.
    """
    asked = user_state_path("specexec", appauthor=False) / "offered"
    if not someone_is_there() or asked.exists():
        return None
    registry = load_registry()
    if registry.used is not None:
        return None
    others = [model for model in registry.models.values() if model.folder is None]
    if len(missing(others)) < len(others):
        return None  # a user who has downloaded a model needs no offer
    found = recommended(fits(described_site(), None), "chat")
    if not found:
        return None
    _remember(asked)
    offer = (
        "Only the demo pair is on this machine: it is small, and answers about Python's standard "
        f"library. Best for this machine: {described(found[0])}."
    )
    print(textwrap.fill(offer, min(shutil.get_terminal_size().columns, 100)), file=sys.stderr)
    return found[0].pair.name if said_yes("Use that one?") else None


def _remember(asked: Path) -> None:
    try:
        asked.parent.mkdir(parents=True, exist_ok=True)
        asked.touch()
    except OSError:  # the offer will be made again
        return
