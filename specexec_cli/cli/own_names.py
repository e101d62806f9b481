"""`specexec use`, `models add` and `models rm`: names of the user's own, and the model to use."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from specexec_cli.catalog import own_entries
from specexec_cli.catalog.downloads import missing, survey
from specexec_cli.catalog.hub import fetch
from specexec_cli.catalog.models_file import ModelEntry, PairEntry
from specexec_cli.catalog.registry import DEMO, Registry, load_registry, user_models_file
from specexec_cli.cli import options
from specexec_cli.cli.complete import names, own_names
from specexec_cli.config import DRAFT_WORDS
from specexec_cli.device import format_bytes
from specexec_cli.errors import ConfigError
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.chosen_models import choose_pair
from specexec_cli.planning.request import Request

Name = Annotated[str, typer.Argument(help="Letters, digits, dots, dashes and underscores.")]


def use(
    model: Annotated[
        str | None,
        typer.Argument(help="A model, as every command takes it.", autocompletion=names),
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Set none: commands take the demo.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Set the model that is taken where none is named, or print it.

    It is kept in models.toml in the platform's config folder, as the line `use = "MODEL"`. A model
    that is not known, or whose files cannot be read, changes nothing.
    """
    registry = load_registry()
    if model is None and not none:
        print(registry.used or DEMO)
        return
    if model is not None and none:
        raise ConfigError("give either a MODEL or --none, not both")
    away = _away(registry, model) if model is not None else ""
    own_entries.set_used(own_entries.lasting(model, registry) if model is not None else None)
    if not quiet:
        print(f"the commands take {model or DEMO} when none is named{away}", file=sys.stderr)


def add(
    name: Name,
    model: Annotated[
        str,
        typer.Argument(help="What it stands for, as every command takes it.", autocompletion=names),
    ],
    draft: Annotated[
        str | None,
        typer.Option(
            help="What drafts for it: a model, suffix, self or auto. Default: as without the name.",
            autocompletion=names,
        ),
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Give a model a name of your own, which every command takes from then on.

    It is kept in models.toml in the platform's config folder: under [names] or, with --draft, as a
    pair [pairs.NAME], whose tree can be edited there. A name that is taken is refused. `specexec
    models rm` takes the name away again.
    """  # fmt: skip
    registry = load_registry()
    away = _away(registry, model)
    word = own_entries.lasting(registry.meant(model), registry)
    if draft is None:
        own_entries.add_name(name, word)
    else:
        draft = registry.meant(draft)
        if draft not in DRAFT_WORDS:
            _check(registry.resolve(draft), registry)
        tree = choose_pair(registry, Request(model=model, draft=draft)).tree
        target = registry.pairs[word].target if word in registry.pairs else word
        own_entries.add_pair(
            PairEntry(
                name=name, target=target, draft=own_entries.lasting(draft, registry),
                budget=tree.budget, depth=tree.max_depth, batch=tree.batch,
            )
        )  # fmt: skip
    if not quiet:
        print(f"{name} is {model}{away}. It stands in {user_models_file()}", file=sys.stderr)


def remove(
    name: Annotated[
        str, typer.Argument(help="A name, pair or model of your own.", autocompletion=own_names)
    ],
    quiet: options.Quiet = False,
) -> None:
    """Take a name, pair or model of your own out of models.toml; its files stay.

    `specexec rm` deletes the files of a model.
    """
    own_entries.remove(name)
    if not quiet:
        print(f"removed {name} from {user_models_file()}", file=sys.stderr)


def _away(registry: Registry, model: str) -> str:
    """What to add to a sentence where the model is not on this machine.

    Raises:
        UnknownModelError, CheckpointError: there is no such model, or it cannot be read.
    """
    entry = registry.resolve(model)
    size = _check(entry, registry)
    if size is None:
        return ""
    size_text = f", {format_bytes(size)}" if size else ""
    return f"; it is not on this machine yet: `specexec pull {model}` fetches it{size_text}"


def _check(entry: ModelEntry, registry: Registry) -> int | None:
    """Makes sure of a model: by its files if they are here, and else by models.toml or the hub.

    Returns:
        Bytes that are to be fetched, 0 where nothing tells; None if the model is here.
    """
    if not missing([entry]):
        read_checkpoint(fetch(entry, offline=True))
        return None
    if entry.name in registry.models:
        return entry.size_bytes or 0
    return survey(entry).fetch_bytes
