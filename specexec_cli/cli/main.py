"""Entry point of `specexec`: the commands, and errors as one line with an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from specexec_cli import __version__
from specexec_cli.cli import bench, models, simulate
from specexec_cli.cli.chat import chat
from specexec_cli.cli.doctor import doctor
from specexec_cli.cli.generate import generate
from specexec_cli.cli.plan import plan
from specexec_cli.cli.train_policy import train_policy
from specexec_cli.errors import SpecexecError

# the base of all mistakes on the command line, which typer does not name itself
_UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="specexec",
    help="Run language models far bigger than your GPU or RAM, without changing their output.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.add_typer(bench.app, name="bench")
app.command()(train_policy)
app.command()(plan)
app.command()(doctor)
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
    """Runs the command line; a SpecexecError or a wrong option becomes one line and its code."""
    # its warnings are for programmers; whoever wants them sets the variable
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        code = app(standalone_mode=False)
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except _UsageError as error:
        code = error.exit_code
        message = error.format_message().rstrip(".")
        if message:  # without any argument the help has been printed, and there is none
            command = error.ctx.command_path if error.ctx is not None else "specexec"
            stop = "" if message.endswith("?") else "."
            print(f"error: {message}{stop} See {command} --help", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
