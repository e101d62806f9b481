"""Shows a reply while it is being written: the text, and one line of status below it.

Lines that may still change are redrawn in place, each time with a single write, so that nothing
flickers. Lines that will not change any more scroll up like any other output.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence

from rich.cells import set_cell_size
from rich.console import Console
from rich.text import Text

from specexec_cli.chat.settings import ChatSettings
from specexec_cli.chat.thinking import Part, ThinkSplitter
from specexec_cli.cli.chat_text import GrowingText, MarkdownText, PlainText
from specexec_cli.cli.live import LiveStatus, Region
from specexec_cli.cli.render import pass_line
from specexec_cli.core import PassProgress, StepResult

# Control characters from a model are shown as symbols and not obeyed: U+241B for an escape etc.
_PICTURES: dict[int, int | None] = {
    code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t\r"
}
_PICTURES |= {0x0D: None, 0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_LEAST_INTERVAL_S = 0.05  # least time between two updates of only the status


class TerminalReply:
    """A reply on a terminal."""

    def __init__(self, console: Console, prompt: str, settings: ChatSettings) -> None:
        self._console = console
        self._settings = settings
        self._region = Region(sys.stdout)
        self._splitter = ThinkSplitter(prompt)
        self._text: GrowingText | None = None
        self._kind = False  # whether self._text is thinking
        self._status = ""
        self._passes = 0
        self._thought = 0  # tokens of hidden thinking
        self._drawn_at = 0.0
        self._stopping = False

    def layer(self, progress: PassProgress) -> None:
        """A layer of the target is done."""
        if not self._stopping:
            self._status = pass_line(progress)
        if time.perf_counter() - self._drawn_at >= _LEAST_INTERVAL_S:
            self._draw([])

    def step(self, step: StepResult) -> None:
        """A pass is done: shows its text."""
        self._passes += 1
        if not self._stopping:
            self._status = self._next_pass()
        settled: list[str] = []
        for piece, drafted in zip(step.pieces, step.drafted, strict=True):
            self._thought += self._splitter.thinking
            for part in self._splitter.push(piece.translate(_PICTURES), drafted):
                settled += self._add(part)
        if self._text is not None:
            settled += self._text.settle()
        self._draw(settled)

    def stopping(self) -> None:
        """The reply will end as soon as it can."""
        self._stopping = True
        self._status = "stopping · Ctrl-C again leaves"
        self._draw([])

    def _add(self, part: Part) -> list[str]:
        if part.thinking and not self._settings.thinking:
            return []
        settled: list[str] = []
        if self._text is None or self._kind != part.thinking:
            if self._text is not None:
                settled = [*self._text.settle(everything=True), ""]
            self._kind = part.thinking
            plain = part.thinking or self._settings.show_drafts or not self._settings.markdown
            self._text = (
                PlainText(self._console, _width, self._style)
                if plain
                else MarkdownText(self._console, _width)
            )
        self._text.add(part)
        return settled

    def _next_pass(self) -> str:
        drafting = self._settings.method != "autoregressive"
        return f"pass {self._passes + 1}" + " · drafting" * drafting

    def _style(self, part: Part) -> str:
        shade = "dim " if part.thinking else ""
        if not self._settings.show_drafts:
            return shade or "none"
        return shade + ("green" if part.drafted else "bold yellow")

    def _draw(self, settled: list[str]) -> None:
        live = self._text.tail() if self._text is not None else []
        room = max(1, shutil.get_terminal_size().lines - 3)
        if self._text is not None and len(live) > room:
            settled += self._text.overflow(len(live) - room)
            live = live[len(live) - room :]
        status = self._status
        if self._thought and not self._settings.thinking:
            status = f"thinking, {self._thought} tokens · {status}"
        self._region.draw(settled, [*live, self._dim(status)])
        self._drawn_at = time.perf_counter()

    def _dim(self, line: str) -> str:
        with self._console.capture() as capture:
            self._console.print(Text(set_cell_size(line, _width()).rstrip(), "dim"), end="")
        return capture.get()

    def __enter__(self) -> TerminalReply:
        self._keyboard = QuietKeyboard()
        self._status = self._next_pass()
        self._draw([])
        return self

    def __exit__(self, *exc_info: object) -> None:
        settled: list[str] = []
        try:
            for part in self._splitter.finish():
                settled += self._add(part)
            if self._text is not None:
                settled += self._text.settle(everything=True)
            self._region.draw(settled, [])
        finally:
            self._keyboard.restore()


class PlainReply:
    """A reply in a pipe or a file: only text, printed as it comes."""

    def __init__(self, prompt: str, settings: ChatSettings, *, status: bool) -> None:
        self._splitter = None if settings.thinking else ThinkSplitter(prompt)
        self._live = LiveStatus(shown=status)

    def layer(self, progress: PassProgress) -> None:
        """A layer of the target is done."""
        self._live.layer(progress)

    def step(self, step: StepResult) -> None:
        """A pass is done: prints its text."""
        self._live.step(step.text)
        self._print(
            step.text if self._splitter is None else _answer(self._splitter.push(step.text))
        )

    def stopping(self) -> None:
        """The reply will end as soon as it can."""

    def _print(self, text: str) -> None:
        print(text, end="", flush=True)

    def __enter__(self) -> PlainReply:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.hide()
        if self._splitter is not None:
            self._print(_answer(self._splitter.finish()))
        self._print("\n")


def _answer(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if not part.thinking)


def _width() -> int:
    # One column less: after a full line, the cursor may be on that line or on the next one.
    return max(1, shutil.get_terminal_size().columns - 1)


class QuietKeyboard:
    """Hides keys pressed during a reply; the next prompt reads them. Ctrl-C still works."""

    def __init__(self) -> None:
        self._before: list[object] | None = None
        if not sys.stdin.isatty() or sys.platform == "win32":
            return
        import termios

        self._before = termios.tcgetattr(sys.stdin)
        mode = termios.tcgetattr(sys.stdin)
        mode[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)

    def restore(self) -> None:
        """Restores the terminal's mode from before the reply."""
        if self._before is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSANOW, self._before)  # type: ignore[arg-type]
