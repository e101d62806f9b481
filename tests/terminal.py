"""A program in a terminal: keys go in, the screen as a person sees it comes out."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pexpect
import pyte

TAB, ENTER, ALT_ENTER, UP = "\t", "\r", "\x1b\r", "\x1b[A"
CTRL_C, CTRL_D = "\x03", "\x04"
PASTE = "\x1b[200~{}\x1b[201~"


class Terminal:
    """Runs a command on a pseudo-terminal and interprets what it writes."""

    def __init__(
        self, command: list[str], *, environment: dict[str, str], columns: int = 80, lines: int = 24
    ) -> None:
        # this emulator does not wrap lines anew when it is resized, which is what xterm does
        env = {**os.environ, "TERM": "xterm-256color", "XTERM_VERSION": "1"}
        for name in ("TMUX", "NO_COLOR"):
            env.pop(name, None)
        env.update(environment)
        for name in ("COLUMNS", "LINES"):  # pytest-xdist sets them, and programs believe them
            env.pop(name, None)
        self.process = pexpect.spawn(
            command[0], command[1:], env=env, dimensions=(lines, columns), timeout=60,
            cwd=str(Path(__file__).parents[1]),
        )  # fmt: skip
        self.process.delaybeforesend = 0.02
        self.screen = pyte.HistoryScreen(columns, lines, history=5000, ratio=1)
        self.screen.write_process_input = self.process.send  # answers cursor position requests
        self.stream = pyte.ByteStream(self.screen)
        self.written = b""
        self.prompts = 0  # input lines seen so far

    def type(self, *keys: str) -> None:
        for text in keys:
            self.process.send(text)

    def pump(self, seconds: float = 0.05) -> bool:
        """Takes what the program writes for a while; False once it has ended."""
        until = time.monotonic() + seconds
        while True:
            try:
                data = self.process.read_nonblocking(65536, timeout=max(0.0, 0.02))
                self.written += data
                self.stream.feed(data)
            except pexpect.TIMEOUT:
                pass
            except pexpect.EOF:
                return False
            if time.monotonic() >= until:
                return True

    def lines(self) -> list[str]:
        """The visible lines, and those that have scrolled up before them."""
        history = [
            "".join(line[x].data for x in range(self.screen.columns))
            for line in self.screen.history.top
        ]
        # the cell behind a wide character is empty
        return [line.rstrip() for line in [*history, *self.screen.display]]

    def text(self) -> str:
        return "\n".join(self.lines()).rstrip()

    def wait(self, text: str, count: int = 1, seconds: float = 60) -> str:
        """Until `text` stands on the screen `count` times; what is there then.

        Raises:
            AssertionError: it does not come; shows the screen.
        """
        until = time.monotonic() + seconds
        alive = True
        while self.text().count(text) < count:
            waiting = alive and time.monotonic() < until
            assert waiting, f"no {text!r} on:\n{self.text()}"
            alive = self.pump()
        return self.text()

    def prompt(self, seconds: float = 60) -> str:
        """Until the next input line waits; what stands between it and the one before."""
        until = time.monotonic() + seconds
        # switching bracketed paste on is how an input line begins
        while not (
            self.written.count(b"\x1b[?2004h") > self.prompts
            and self.screen.display[self.screen.cursor.y].startswith(("> ", "… "))
        ):
            waiting = self.pump() and time.monotonic() < until
            assert waiting, f"no input line on:\n{self.text()}"
        self.prompts = self.written.count(b"\x1b[?2004h")
        return self.text().rsplit("\n> ", 2)[-2]

    def ask(self, *keys: str) -> str:
        """Sends a message; returns it and what stands below it when all is done."""
        self.type(*keys, ENTER)
        return self.prompt()

    def resize(self, lines: int, columns: int) -> None:
        self.screen.resize(lines, columns)
        self.process.setwinsize(lines, columns)

    def end(self) -> int:
        """Waits for the end; the exit code."""
        while self.pump(0.2):
            pass
        self.process.close()
        return self.process.exitstatus if self.process.exitstatus is not None else -1

    def kill(self) -> None:
        self.process.kill(signal.SIGKILL)
        self.process.wait()
