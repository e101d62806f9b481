"""Adds commands of other packages to `specexec`, by entry points.

A package that is installed beside specexec adds a command by two lines in its pyproject.toml:

    [project.entry-points."specexec.commands"]
    greet = "its_package.commands:greet"

The second line names a function with typer's annotations, or a typer.Typer with several commands.
The lab's commands (specexec_cli/lab) are added in the same way.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from specexec_cli.cli.panels import PanelCommand
from specexec_cli.errors import ConfigError


def add_installed(app: typer.Typer) -> None:
    """Adds the commands of all installed packages after the app's own.

    A name that is already taken keeps its command. A command that cannot be imported says so when
    it is called, so that another package's mistake does not stop specexec.
    """
    taken: set[Any] = {each.name for each in app.registered_groups}
    for command in app.registered_commands:
        taken.add(command.name or getattr(command.callback, "__name__", None))
    for point in entry_points(group="specexec.commands"):
        if point.name in taken:
            continue
        taken.add(point.name)
        try:
            command = point.load()
        except Exception as error:  # another package's code may raise anything
            _add_refused(app, point, error)
            continue
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=point.name)
        else:
            app.command(point.name, cls=PanelCommand)(command)


def _add_refused(app: typer.Typer, point: EntryPoint, error: Exception) -> None:
    """Adds a command that only says why another package's command cannot be used."""
    package = point.dist.name if point.dist else "another package"
    whatever = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(point.name, cls=PanelCommand, context_settings=whatever)
    def refused(_: typer.Context) -> None:
        raise ConfigError(
            f"the command '{point.name}' of {package} cannot be imported ({error!r}): install "
            f"another version of {package}, or remove it"
        )
