"""The commands of `specexec` by name, each imported when it is asked for.

A package that is installed beside specexec adds a command by two lines in its pyproject.toml:

    [project.entry-points."specexec.commands"]
    greet = "its_package.commands:greet"

The second line names a function with typer's annotations, or a typer.Typer with several commands.
The lab's commands (specexec_cli/lab) are added in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.core import TyperCommand
from typer.main import get_command

from specexec_cli.cli.panels import PanelCommand, PanelGroup
from specexec_cli.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class _Place(NamedTuple):
    module: str
    name: str  # in the module: a function with typer's annotations, or a typer.Typer
    help: str  # its line in `specexec --help`, which is the first paragraph of its own help


_OWN = {
    "generate": _Place(
        "specexec_cli.cli.generate", "generate",
        "Answer a prompt; a base model continues it. All but the answer goes to stderr.",
    ),
    "chat": _Place(
        "specexec_cli.cli.chat", "chat",
        "Chat with a model. /help lists the commands; Ctrl-C stops a reply, Ctrl-D leaves.",
    ),
    "serve": _Place(
        "specexec_cli.cli.serve", "serve",
        "Serve models by OpenAI's and Anthropic's protocols and a page.",
    ),
    "worker": _Place(
        "specexec_cli.cli.worker", "worker",
        "Run layers of MODEL for a session on another machine.",
    ),
    "plan": _Place(
        "specexec_cli.cli.plan", "plan",
        "Say how fast a model would write here, and where each layer would live.",
    ),
    "pull": _Place(
        "specexec_cli.cli.pull", "pull",
        "Fetch a pair's two models, or one model, into the hub's cache.",
    ),
    "rm": _Place(
        "specexec_cli.cli.pull", "rm",
        "Delete models from the hub's cache, or copies of --draft self.",
    ),
    "cache": _Place(
        "specexec_cli.cli.cache", "cache",
        "List what is kept of texts on disk, or delete it.",
    ),
    "use": _Place(
        "specexec_cli.cli.own_names", "use",
        "Set the model that is taken where none is named, or print it.",
    ),
    "quantize": _Place(
        "specexec_cli.cli.quantize", "quantize",
        "Write a quantized copy of a checkpoint, in the format of GPTQModel (gptq_v2).",
    ),
    "doctor": _Place(
        "specexec_cli.cli.doctor", "doctor",
        "Look at this machine and measure its disk, memory and arithmetic; takes some seconds.",
    ),
    "models": _Place(
        "specexec_cli.cli.models", "app",
        "Named models and pairs: where they run here, and how fast.",
    ),
}  # fmt: skip


class CommandGroup(PanelGroup):
    """The group of all commands. Running a command, or --help, imports none of the others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        commands: Any = _Commands()  # typer declares a mapping that can be changed, and reads it
        self.commands = commands

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help; specexec's own commands are not imported for their lines in it."""
        shown = copy.copy(self)
        shown.commands = {
            name: TyperCommand(name, help=_OWN[name].help) if name in _OWN else self.commands[name]
            for name in self.commands
        }
        super(CommandGroup, shown).format_help(ctx, formatter)


class _Commands(Mapping[str, Any]):
    """Commands by name, each imported when it is asked for.

    A name of specexec's own keeps its command, whatever another package calls its own. A command
    that cannot be imported says so when it is called, so that another package's mistake does not
    stop specexec.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            app = typer.Typer(add_completion=False)
            app.callback()(lambda: None)  # without one, typer makes no group of a single command
            if name in _OWN:
                own = _OWN[name]
                _add(app, name, getattr(import_module(own.module), own.name))
            else:
                _add_installed(app, self._installed[name])
            group: Any = get_command(app)
            self._made[name] = group.commands[name]
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*_OWN, *self._installed]))

    def __len__(self) -> int:
        return len({*_OWN, *self._installed})

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        """The first command of each name that packages add."""
        # imported here: it takes long, and specexec's own commands do not need it
        from importlib.metadata import entry_points

        found: dict[str, EntryPoint] = {}
        for point in entry_points(group="specexec.commands"):
            found.setdefault(point.name, point)
        return found


def _add(app: typer.Typer, name: str, command: Any) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name, cls=PanelCommand)(command)


def _add_installed(app: typer.Typer, point: EntryPoint) -> None:
    try:
        command = point.load()
    except Exception as error:  # another package's code may raise anything
        _add_refused(app, point, error)
    else:
        _add(app, point.name, command)


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
