"""Prints a generated text as it comes: the answer to stdout, a chat's thinking to stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from specexec_cli.chat.thinking import Part, ThinkSplitter
from specexec_cli.cli.live import LiveStatus


class PrintedText:
    """One text on its way to the user.

    Args:
        rendered: the prompt in the model's chat template; None where text is continued, which is
            printed whole.
        quiet: print no thinking.
    """

    def __init__(self, rendered: str | None, live: LiveStatus, quiet: bool) -> None:
        self._splitter = None if rendered is None else ThinkSplitter(rendered)
        self._live = live
        self._quiet = quiet
        self._thinking = False  # whether the last printed text was thinking

    def add(self, text: str) -> None:
        """Prints the text of a pass."""
        self._live.step("")
        self._print(self._splitter.push(text) if self._splitter else [Part(text, False)])

    def finish(self) -> None:
        """Ends the text, and its line."""
        self._live.hide()
        self._print(self._splitter.finish() if self._splitter else [])
        self._end_thinking()
        print(flush=True)

    def _print(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if not part.thinking:
                self._end_thinking()
                self._live.step(part.text)
                print(part.text, end="", flush=True)
            elif not self._quiet:
                self._thinking = True
                self._live.step(part.text, on_stderr=True)
                dim = f"\x1b[2m{part.text}\x1b[22m" if sys.stderr.isatty() else part.text
                print(dim, end="", file=sys.stderr, flush=True)

    def _end_thinking(self) -> None:
        if self._thinking:
            self._thinking = False
            self._live.step("\n", on_stderr=True)
            print(file=sys.stderr, flush=True)
