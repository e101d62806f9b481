"""`specexec cache`: lists and deletes the rows of texts that sessions keep on disk."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Annotated

import typer

from specexec_cli.cli import options
from specexec_cli.cli.pull import agreed
from specexec_cli.device import format_bytes
from specexec_cli.errors import UnknownModelError
from specexec_cli.prefixes.folder import (
    Bound,
    kept_prefixes,
    prefixes_folder,
    remove_prefixes,
)


def cache(
    name: Annotated[
        str, typer.Argument(help="What the names of models begin with. Default: all of them.")
    ] = "",
    clear: Annotated[bool, typer.Option("--clear", help="Delete their rows.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """List what is kept of texts on disk, or delete it.

    chat, generate and serve keep what a target computed, unless --no-cache is given, so that a text
    that goes on or begins alike is not read again. What was used longest ago leaves (--cache-gb).
    """
    found = kept_prefixes(name)
    if name and not found:
        raise UnknownModelError(f"nothing is kept by a name that begins with '{name}'")
    if clear and found:
        sizes = {each.name: each.size_bytes for each in found}
        named = agreed(sizes, f"In {prefixes_folder()}", yes=yes)
        for each in found:
            remove_prefixes(each)
        if not quiet:
            print(f"deleted {named}", file=sys.stderr)
        return
    for each in found:
        used = datetime.fromtimestamp(each.used_s)
        print(f"{each.name}  {format_bytes(each.size_bytes)}, last used {used:%Y-%m-%d %H:%M}")
    if not quiet:
        kept = sum(each.size_bytes for each in (kept_prefixes() if name else found))
        print(
            f"{format_bytes(kept)} of at most {format_bytes(Bound().bytes(kept))} in "
            f"{prefixes_folder()}",
            file=sys.stderr,
        )
