"""Splits a reply into answer, thinking and calls while it is being written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specexec_cli.chat.thinking import Part, ThinkSplitter
from specexec_cli.serve.bodies import Tool
from specexec_cli.serve.tools import Call, Dialect


@dataclass(frozen=True, slots=True)
class Said:
    """The parts of a reply that can be sent now."""

    content: str = ""
    thinking: str = ""
    calls: tuple[Call, ...] = ()

    def __add__(self, other: Said) -> Said:
        """Both parts, one after the other."""
        return Said(
            self.content + other.content, self.thinking + other.thinking, self.calls + other.calls
        )


class ReplyText:
    """Splits a chat reply.

    Args:
        prompt: the rendered prompt, because some templates open the thinking part. None if the
            reply has no thinking and marks of thinking are plain text.
        dialect: the model's dialect for calls; None without tools.
        one_call: report only the first call of the reply.
    """

    def __init__(
        self,
        prompt: str | None,
        dialect: Dialect | None,
        tools: Sequence[Tool],
        *,
        one_call: bool = False,
    ) -> None:
        self._split = None if prompt is None else ThinkSplitter(prompt)
        self._dialect = dialect
        self._tools = tools
        self._most_calls = 1 if one_call else None
        self._held = ""  # text of a call, or that may become a call
        self._spoken = False  # whether a part of the answer was returned

    def push(self, text: str) -> Said:
        """Takes text; returns the parts that can be sent now."""
        parts = [Part(text, thinking=False)] if self._split is None else self._split.push(text)
        return self._said(parts, ended=False)

    def take(self, texts: Iterable[str], ended: bool) -> Said:
        """Takes several texts, and the end if the reply `ended` with them."""
        said = sum(map(self.push, texts), Said())
        return said + self.finish() if ended else said

    def finish(self) -> Said:
        """The parts that were held back; to be called at the end of the text."""
        return self._said([] if self._split is None else self._split.finish(), ended=True)

    def _said(self, parts: Sequence[Part], *, ended: bool) -> Said:
        thinking = "".join(part.text for part in parts if part.thinking)
        answer = "".join(part.text for part in parts if not part.thinking)
        if self._dialect is None:
            return Said(answer, thinking)
        self._held += answer
        begins = self._dialect.begins(self._held)
        if begins is not None and not self._dialect.opens and self._spoken:
            begins = None  # a call without marks must be the whole reply
        if begins is None:
            begins = len(self._held)
        content, self._held = self._held[:begins], self._held[begins:]
        calls: list[Call] = []
        if ended:
            calls = self._dialect.calls(self._held, self._tools)
            if not calls:
                content += self._held
            calls = calls[: self._most_calls]
            self._held = ""
        self._spoken = self._spoken or bool(content.strip())
        if calls:
            content = content.rstrip()
        return Said(content, thinking, tuple(calls))
