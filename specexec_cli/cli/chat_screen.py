"""Shows a chat's notices, errors, tables, statistics and replies."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from specexec_cli.chat.settings import ChatSettings
from specexec_cli.cli.chat_reply import PlainReply, TerminalReply
from specexec_cli.cli.mends import with_options
from specexec_cli.cli.render import stats_line
from specexec_cli.core import GenerationStats


class ConsoleScreen:
    """The chat's screen: replies go to stdout, everything else to stderr."""

    def __init__(self, *, quiet: bool, interactive: bool) -> None:
        self._quiet = quiet
        self._interactive = interactive
        self._out = Console(highlight=False, theme=Theme({"markdown.code": "cyan"}))
        self._aside = Console(stderr=True, highlight=False)
        self._lively = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"

    def notice(self, text: str) -> None:
        """Prints a notice to the user on stderr."""
        if not self._quiet:
            text = with_options(text)
            self._say(text if self._aside.is_terminal else f"notice: {text}", "dim")

    def error(self, text: str) -> None:
        """Prints an error on stderr: one line with its cause and mend."""
        self._say(f"error: {with_options(text)}", "red")

    def _say(self, text: str, style: str) -> None:
        # only terminals get broken lines; in a file a line stays whole
        self._aside.print(Text(text, style), soft_wrap=not self._aside.is_terminal)

    def echo(self, text: str) -> None:
        """Prints a message that was not typed, such as a script's; only on a terminal."""
        if self._lively:
            self._out.print(Text(f"> {text}", "bold"))

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints a command's answer, one name and value per line."""
        if not self._aside.is_terminal:
            width = max(len(name) for name, _ in rows)
            for name, value in rows:
                print(f"{name.ljust(width)}  {value}".rstrip(), file=sys.stderr)
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="cyan")
        table.add_column()
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        self._aside.print(table)

    def stats(self, stats: GenerationStats) -> None:
        """Prints a reply's statistics below the reply."""
        if self._quiet:
            return
        line = stats_line(stats, brief=True)
        if self._aside.is_terminal:
            self._aside.print(Text("\n".join(_wrapped(line, self._aside.width)), "dim"))
        else:
            print(line, file=sys.stderr)

    def reply(self, prompt: str, settings: ChatSettings) -> TerminalReply | PlainReply:
        """Makes the object that shows one reply."""
        if self._lively:
            return TerminalReply(self._out, prompt, settings)
        return PlainReply(prompt, settings, status=not self._quiet)

    def confirm(self, question: str) -> bool:
        """Asks a yes-or-no question; True without a terminal."""
        if not self._interactive:
            return True
        self._aside.print(Text(f"{question} [Y/n] ", "bold"), end="")
        try:
            return sys.stdin.readline().strip().lower() in ("", "y", "yes")
        except KeyboardInterrupt:
            self._aside.print()
            return False


def _wrapped(line: str, width: int) -> list[str]:
    """Breaks a line of statistics that is wider than the terminal, between two statistics."""
    lines = [""]
    for part in line.split(" · "):
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        if lines[-1] and len(joined) >= width:
            lines.append(part)
        else:
            lines[-1] = joined
    return lines
