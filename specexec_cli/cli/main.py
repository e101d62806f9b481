"""Entry point of `specexec`: the commands, and errors as one line with an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from specexec_cli import __version__
from specexec_cli.cli import models, simulate
from specexec_cli.cli.chat import chat
from specexec_cli.cli.generate import generate
from specexec_cli.errors import SpecexecError

app = typer.Typer(
    name="specexec",
    help="Run language models far bigger than your GPU or RAM, without changing their output.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.add_typer(models.app, name="models")
app.add_typer(simulate.app, name="simulate")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"specexec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command line; a SpecexecError becomes one line and its exit code."""
    try:
        app()
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
