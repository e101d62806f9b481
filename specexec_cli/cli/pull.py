"""`specexec pull` and `specexec rm`: download models to this machine and delete them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specexec_cli.catalog.downloads import cached, missing, remove, survey
from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.catalog.own_copies import PREFIX, copies_folder, own_copies, remove_copy
from specexec_cli.catalog.registry import Registry, load_registry
from specexec_cli.cli import option_groups, options
from specexec_cli.cli.complete import names
from specexec_cli.cli.fetching import agree, fetch_all, fit_line, planned, said_yes
from specexec_cli.cli.mends import with_mend
from specexec_cli.device import format_bytes
from specexec_cli.errors import ConfigError, NotFetchedError, OutOfMemoryError, UnknownModelError
from specexec_cli.planning.request import Request

Name = Annotated[
    str,
    typer.Argument(
        help="A pair or model of models.toml, or a hub id: org/name, org/name@revision, "
        "org/name:FILE.gguf or org/name:Q4_K_M.",
        autocompletion=names,
    ),
]


def pull(
    name: Name,
    yes: options.Yes = False,
    models_file: option_groups.ModelsFile = None,
    quiet: options.Quiet = False,
) -> None:
    """Fetch a pair's two models, or one model, into the hub's cache.

    Says first how much there is to fetch and whether it fits this machine. However it was stopped,
    the same command goes on where it was; only an unfinished file of more than 50 GB, or on a disk
    without symbolic links, begins anew.
    """
    registry = load_registry(models_file)
    entries = _entries(registry, name)
    downloads = [survey(entry) for entry in missing(entries)]
    if not downloads:
        if not quiet:
            print(f"{name} is on this machine already", file=sys.stderr)
        return
    in_file = any(item.entry.file for item in downloads)  # only the file tells its layers' sizes
    fits = "" if in_file else _fits(registry, name, models_file)
    agree(downloads, fits, yes=yes, quiet=quiet)
    fetch_all(downloads, quiet=quiet)
    if not quiet:
        print(f"{name} is on this machine now", file=sys.stderr)


def rm(
    name: Annotated[
        str,
        typer.Argument(
            help="A pair or model of models.toml, a hub id: org/name or org/name@revision, or what "
            "the names of own copies begin with: self:NAME.",
            autocompletion=names,
        ),
    ],
    yes: options.Yes = False,
    models_file: option_groups.ModelsFile = None,
    quiet: options.Quiet = False,
) -> None:
    """Delete models from the hub's cache, or copies of --draft self.

    A pair's name stands for its two models. `specexec models list --all` names the copies; `self:`
    alone are all of them.
    """
    if name.startswith(PREFIX):
        _remove_copies(name, yes=yes, quiet=quiet)
        return
    entries = _entries(load_registry(models_file), name)
    for entry in entries:
        if entry.folder is not None:
            raise ConfigError(
                f"{entry.name} is {entry.folder}, and not in the hub's cache: nothing was deleted"
            )
    found = [item for entry in entries if (item := cached(entry)) is not None]
    if not found:
        raise UnknownModelError(f"nothing of {name} is in the hub's cache")
    sizes = {item.repo: item.size_bytes for item in found}
    named = agreed(sizes, "In the hub's cache", yes=yes)
    for item in found:
        remove(item)
    if not quiet:
        print(f"deleted {named}", file=sys.stderr)


def _remove_copies(name: str, *, yes: bool, quiet: bool) -> None:
    found = own_copies(name)
    if not found:
        raise UnknownModelError(
            f"no own copy's name begins with '{name}': `specexec models list --all` names them"
        )
    sizes = {item.name: item.size_bytes for item in found}
    named = agreed(sizes, f"In {copies_folder()}", yes=yes)
    for item in found:
        remove_copy(item)
    if not quiet:
        print(f"deleted {named}", file=sys.stderr)


def agreed(sizes: Mapping[str, int], where: str, *, yes: bool) -> str:
    """Asks before a deletion; returns the names and sizes of what may be deleted, as text.

    Args:
        sizes: bytes that would be deleted, by name.
        where: words for the place of the files.
    Raises:
        NotFetchedError: the user did not agree, or nobody could be asked.
    """
    named = " and ".join(f"{name} ({format_bytes(size)})" for name, size in sizes.items())
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise NotFetchedError(f"{named} would be deleted: agree with --yes")
        print(f"{where}: {named}.", file=sys.stderr)
        if not said_yes(f"Delete {format_bytes(sum(sizes.values()))}?"):
            raise NotFetchedError("nothing was deleted")
    return named


def _entries(registry: Registry, name: str) -> list[ModelEntry]:
    """The models that a name stands for: one model, or a pair's target and any draft model."""
    name = registry.meant(name)
    if name in registry.pairs:
        pair = registry.pairs[name]
        draft = registry.draft_of(pair)
        return [registry.resolve(pair.target), *([draft] if draft is not None else [])]
    return [registry.resolve(name)]


def _fits(registry: Registry, name: str, models_file: Path | None) -> str:
    """A sentence that says whether it would run here; it can be pulled in any case."""
    alone = Request(model=name, method="autoregressive", models_file=models_file)
    in_pair = registry.meant(name) in registry.pairs
    request = replace(alone, method="specexec") if in_pair else alone
    try:
        return fit_line(planned(request))
    except OutOfMemoryError as error:
        return f"It does not fit this machine: {with_mend(error)}."
