"""Renders growing text as terminal lines: settled lines, and a tail that may still change.

More text can only change the looks of the last paragraph, list, table or code block. Everything
before that block is settled: it is rendered once and printed for good.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.syntax import Syntax
from rich.text import Text

from specexec_cli.chat.thinking import Part

_PADDING = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")  # spaces at a line's end, before its reset code


class GrowingText(Protocol):
    """Text that grows, rendered as lines."""

    def add(self, part: Part) -> None:
        """Appends text."""

    def settle(self, everything: bool = False) -> list[str]:
        """Lines that will not change any more and were not returned before."""

    def tail(self) -> list[str]:
        """Lines that may still change."""

    def overflow(self, count: int) -> list[str]:
        """Settles the first `count` lines of the tail, because the screen has no room for them."""


class _Lines:
    """The base of both kinds of growing text: renders at one width, and counts overflowed lines."""

    def __init__(self, console: Console, width: Callable[[], int]) -> None:
        self._console = console
        self._width_now = width
        self._width = width()
        self._early = 0  # lines of the unsettled text that overflow() has settled

    def _render(self, renderable: RenderableType) -> list[str]:
        with self._console.capture() as capture:
            self._console.print(renderable, width=self._width)
        lines = [_PADDING.sub(r"\1", line) for line in capture.get().split("\n")]
        while lines and not Text.from_ansi(lines[-1]).plain:
            lines.pop()
        while lines and not Text.from_ansi(lines[0]).plain:
            del lines[0]
        return lines

    def _settled(self, lines: list[str]) -> list[str]:
        """Drops lines that overflow() has settled before; later lines may get another width."""
        fresh = lines[self._early :]
        self._early = max(0, self._early - len(lines))
        if self._early == 0:
            self._width = self._width_now()
        return fresh

    def tail(self) -> list[str]:
        """Lines that may still change."""
        if self._early == 0:
            self._width = self._width_now()
        return self._unsettled()[self._early :]

    def overflow(self, count: int) -> list[str]:
        """Settles the first `count` lines of the tail."""
        lines = self.tail()[:count]
        self._early += len(lines)
        return lines

    def _unsettled(self) -> list[str]:
        raise NotImplementedError


class PlainText(_Lines):
    """Styled plain text, wrapped between words."""

    def __init__(
        self, console: Console, width: Callable[[], int], style: Callable[[Part], str]
    ) -> None:
        super().__init__(console, width)
        self._style = style
        self._text = Text()

    def add(self, part: Part) -> None:
        """Appends text."""
        self._text.append(part.text, self._style(part))

    def settle(self, everything: bool = False) -> list[str]:
        """New settled lines: the text up to the last line break."""
        end = len(self._text) if everything else self._text.plain.rfind("\n") + 1
        if end == 0:
            return []
        head, self._text = self._text[:end], self._text[end:]
        return self._settled(self._wrapped(head))

    def _unsettled(self) -> list[str]:
        return self._wrapped(self._text)

    def _wrapped(self, text: Text) -> list[str]:
        """The text's lines at the terminal's width; empty lines are kept, unlike in Markdown."""
        if not text:
            return []
        lines = []
        for line in text.split("\n"):
            lines += self._render(line) or [""]
        return lines


class MarkdownText(_Lines):
    """Markdown, rendered block by block."""

    def __init__(self, console: Console, width: Callable[[], int]) -> None:
        super().__init__(console, width)
        self._text = ""
        self._begun = False  # whether a block was settled: an empty line precedes the next one

    def add(self, part: Part) -> None:
        """Appends text."""
        self._text += part.text

    def settle(self, everything: bool = False) -> list[str]:
        """New settled lines: all blocks except the last."""
        starts = _block_starts(self._text)
        settled: list[str] = []
        count = len(starts) if everything else len(starts) - 1
        if count < 1:
            return []
        ends = [*starts[1:], len(self._text)]
        for start, end in zip(starts[:count], ends[:count], strict=True):
            settled += self._settled(self._block(self._text[start:end]))
        self._text = self._text[ends[count - 1] :]
        return settled

    def _unsettled(self) -> list[str]:
        begun = self._begun
        try:
            return self._block(self._text) if self._text.strip() else []
        finally:
            self._begun = begun

    def _block(self, text: str) -> list[str]:
        lines = self._render(_Markdown(text))
        if lines and self._begun:
            lines.insert(0, "")
        self._begun = self._begun or bool(lines)
        return lines


def _parser() -> MarkdownIt:
    # HTML is off: text in angle brackets is mostly code, and would vanish as HTML
    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


def _block_starts(text: str) -> list[int]:
    """Offsets at which the top-level blocks begin; the first is 0."""
    tokens = _parser().parse(text)
    lines = [token.map[0] for token in tokens if token.level == 0 and token.map is not None]
    offsets = [0]
    for line in text.split("\n"):
        offsets.append(offsets[-1] + len(line) + 1)
    starts = sorted({offsets[line] for line in lines})
    return [0, *starts[1:]] if starts else []


class _Heading(Heading):
    LEVEL_ALIGN = dict.fromkeys(Heading.LEVEL_ALIGN, "left")


class _CodeBlock(CodeBlock):
    """A code block without background or padding, so that code can be copied from the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        language = "" if self.lexer_name == "text" else self.lexer_name
        yield Text(f"```{language}", style="dim")
        yield Syntax(
            str(self.text).rstrip("\n"), self.lexer_name, theme=self.theme, word_wrap=True,
            background_color="default",
        )  # fmt: skip
        yield Text("```", style="dim")


class _Markdown(Markdown):
    """rich's Markdown that keeps line breaks and angle brackets."""

    elements = {  # noqa: RUF012 - overrides a class variable
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _CodeBlock,
        "code_block": _CodeBlock,
    }

    def __init__(self, markup: str) -> None:
        super().__init__(markup, code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _parser().parse(markup)
        _keep_breaks(self.parsed)


def _keep_breaks(tokens: Sequence[Token]) -> None:
    for token in tokens:
        if token.type == "softbreak":
            token.type = "hardbreak"
        _keep_breaks(token.children or ())
