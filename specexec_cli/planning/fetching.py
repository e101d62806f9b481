"""What a request would have to download, before any of it is."""

from __future__ import annotations

from collections.abc import Sequence

from specexec_cli.catalog.downloads import Download, free_disk_bytes, missing, survey
from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.catalog.registry import load_registry
from specexec_cli.device import format_bytes
from specexec_cli.errors import NotFetchedError
from specexec_cli.planning.pair import choose_pair
from specexec_cli.planning.request import Request


def models_of(request: Request) -> list[ModelEntry]:
    """Target and draft models of the request, at the revisions it asks for.

    Raises:
        UnknownModelError, ConfigError: see choose_pair.
    """
    registry = load_registry(request.models_file)
    pair = choose_pair(registry, request)
    if pair.draft is None or pair.own_bits is not None:  # that one is made of the target
        return [pair.target]
    more = request.dsi.more_drafts if request.method == "dsi" else ()
    return [pair.target, pair.draft, *map(registry.resolve, more)]


def to_fetch(request: Request) -> list[Download]:
    """What is not on this machine; nothing where the request may not use the network.

    Raises:
        UnknownModelError: a name is not known, or the hub has no such model or does not answer.
    """
    from huggingface_hub import constants

    absent = missing(models_of(request))
    if request.offline or constants.is_offline_mode():
        return []
    return [survey(entry) for entry in absent]


def check_room(downloads: Sequence[Download]) -> int:
    """Makes sure that the disk has room for what is to be fetched.

    Returns:
        Bytes that are free on the cache's disk.
    Raises:
        NotFetchedError: it is too small.
    """
    from huggingface_hub import constants

    needed = sum(download.fetch_bytes for download in downloads)
    free = free_disk_bytes()
    if needed > free:
        raise NotFetchedError(
            f"{format_bytes(needed)} to fetch, but the disk of {constants.HF_HUB_CACHE} has "
            f"{format_bytes(free)} free: `specexec rm NAME` makes room, or set HF_HOME to a folder "
            "on a larger disk"
        )
    return free


def fetch_line(downloads: list[Download]) -> str:
    """How much a download is, in one line, for whoever is not asked."""
    named = ", ".join(f"{item.entry.repo} {format_bytes(item.fetch_bytes)}" for item in downloads)
    return f"fetching {named} into the cache of the hub"
