"""Redraws the last lines on a terminal in place while something runs.

Each update is a single write, so that nothing flickers. Lines that will not change any more scroll
up like any other output.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.text import Text

from specexec_cli.cli.render import pass_line
from specexec_cli.core import PassProgress


class Region:
    """The live lines below the printed text, which each `draw` replaces."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._widths: list[int] = []  # widths of the live lines, in terminal cells

    @property
    def drawn(self) -> bool:
        """Whether there are live lines now."""
        return bool(self._widths)

    def draw(self, settled: Sequence[str], live: Sequence[str], column: int = 0) -> None:
        """Replaces the live lines by `settled`, printed for good, and `live` below it.

        Args:
            column: terminal column, in cells, at which the text above ends. If there are no lines
                to print, the cursor returns to that column; otherwise it stays below the lines.
        """
        lines = [*settled, *live]
        # \x1b[?2026h..l: terminals that support this show the whole update at once
        parts = ["\x1b[?2026h", self._to_top()]
        if column and lines and not self.drawn:
            parts.append("\n")
        parts += [f"\x1b[2K{line}\n" for line in lines]
        parts.append("\x1b[J")
        if column and self.drawn and not lines:
            parts.append(f"\x1b[1A\x1b[{column}C")
        parts.append("\x1b[?2026l")
        self._out.write("".join(parts))
        self._out.flush()
        self._widths = [Text.from_ansi(line).cell_len for line in live]

    def _to_top(self) -> str:
        """The code that moves the cursor to the first live line, also in a narrower window."""
        rows = len(self._widths)
        if _reflows():
            columns = shutil.get_terminal_size().columns
            rows = sum(max(1, -(-width // columns)) for width in self._widths)
        return f"\r\x1b[{rows}A" if rows else ""


def _reflows() -> bool:
    """Whether the terminal wraps old lines again when its width changes; most do."""
    if "TMUX" in os.environ:
        return True
    term = os.environ.get("TERM", "")
    return "XTERM_VERSION" not in os.environ and not term.startswith(("linux", "rxvt", "screen"))


class PassingLine:
    """A line that says what is being waited for, until there is something else to print.

    Only a terminal shows it. It must be hidden before anything is printed below it.
    """

    def __init__(self, text: str, *, shown: bool) -> None:
        stream = sys.stderr
        self._region = Region(stream)
        # while a bar is shown, rich has put a stream of its own in the place of stderr
        if shown and stream is not None and stream.isatty() and stream is sys.__stderr__:
            width = shutil.get_terminal_size().columns
            seen = "".join(character for character in text if character.isprintable())
            self._region.draw([], [seen[: width - 1]])

    def hide(self) -> None:
        """Clears the line; idempotent."""
        if self._region.drawn:
            self._region.draw([], [])

    def __enter__(self) -> PassingLine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.hide()


class LiveStatus:
    """A line below the text while a pass runs: pass, layer, bandwidth, draft nodes.

    The text may end in the middle of a line of the same terminal. The status then takes the next
    line, and hiding it brings the cursor back to where the text ended. Passes shorter than
    `_PATIENCE_S` show nothing.
    """

    _PATIENCE_S = 0.5
    _REDRAW_S = 0.1

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._shares_terminal = sys.stdout.isatty()
        self._column = 0  # column at which the text ends, in terminal cells
        self._region = Region(sys.stderr)
        self._next_s = time.perf_counter() + self._PATIENCE_S

    def layer(self, progress: PassProgress) -> None:
        """A layer of the target is done."""
        width = shutil.get_terminal_size().columns
        # After filling a line the cursor is still on that line, so hide() could not return to it.
        full = self._column > 0 and self._column % width == 0
        if not self._shown or full or time.perf_counter() < self._next_s:
            return
        self._next_s = time.perf_counter() + self._REDRAW_S
        self._region.draw([], [pass_line(progress)[: width - 1]], self._column % width)

    def step(self, text: str, *, on_stderr: bool = False) -> None:
        """A pass is done and `text` is about to be printed, to stdout unless told."""
        self.hide()
        self._next_s = time.perf_counter() + self._PATIENCE_S
        if self._shares_terminal or on_stderr:
            last_line = text.rpartition("\n")
            kept = 0 if last_line[1] else self._column
            self._column = kept + cell_len(last_line[2])

    def hide(self) -> None:
        """Clears the status and moves the cursor back to the end of the text; idempotent."""
        if self._region.drawn:
            self._region.draw([], [], self._column % shutil.get_terminal_size().columns)

    def __enter__(self) -> LiveStatus:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.hide()
