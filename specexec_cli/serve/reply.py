"""One reply as a client is told it: answer, thinking and calls, as the steps come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specexec_cli.chat.thinking import Part, ThinkSplitter
from specexec_cli.serve.bodies import Tool
from specexec_cli.serve.tools import Call, Dialect


@dataclass(frozen=True, slots=True)
class Said:
    """What may be told now."""

    content: str = ""
    thinking: str = ""
    calls: tuple[Call, ...] = ()


class ReplyText:
    """Splits a chat reply.

    Args:
        prompt: as the chat template rendered it; some open the thinking part themselves. None where
            the reply has no thinking, and its marks are text like any other.
        dialect: how calls are written; None where there are no tools.
        one_call: tell the first call of the reply alone.
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
        self._held = ""  # a call, or what may turn out to be one
        self._spoken = False  # some of the answer has been told

    def push(self, text: str) -> Said:
        """Takes text; returns what it releases."""
        parts = [Part(text, thinking=False)] if self._split is None else self._split.push(text)
        return self._said(parts, ended=False)

    def finish(self) -> Said:
        """What was held back, once the text is over."""
        return self._said([] if self._split is None else self._split.finish(), ended=True)

    def _said(self, parts: Sequence[Part], *, ended: bool) -> Said:
        thinking = "".join(part.text for part in parts if part.thinking)
        answer = "".join(part.text for part in parts if not part.thinking)
        if self._dialect is None:
            return Said(answer, thinking)
        self._held += answer
        begins = self._dialect.begins(self._held)
        if begins is not None and not self._dialect.opens and self._spoken:
            begins = None  # such a call is the whole reply
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
