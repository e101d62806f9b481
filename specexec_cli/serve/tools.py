"""Tools: how the models of each family write a call, and how it is read back.

A model's chat template tells it of the tools and of the way to call them; which way that is, is
seen from the marks in the template.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specexec_cli.serve.bodies import Tool


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function."""

    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one family writes calls: JSON objects between two marks."""

    mark: str  # in the chat template
    opens: str  # before a call; a reply that begins with "{" is one, where this is empty
    closes: str
    arguments: str  # the key of the arguments

    def grammar(self, tools: Sequence[Tool]) -> str:
        """Exactly one call of one of the tools, in llguidance's dialect of Lark."""
        calls = []
        for tool in tools:
            # the parameters are a schema of their own, since their references begin at their root
            schema = {
                **(tool.function.parameters or {"type": "object"}),
                # JSON as templates write it, and as models have learned it
                "x-guidance": {
                    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
                },
            }  # fmt: skip
            before = f'{{"name": {json.dumps(tool.function.name)}, "{self.arguments}": '
            calls.append(f'{json.dumps(before)} %json {json.dumps(schema)} "}}"')
        rules = "\n".join(f"call{index}: {call}" for index, call in enumerate(calls))
        either = " | ".join(f"call{index}" for index in range(len(calls)))
        opens = f'"{self.opens}" "\\n" ' if self.opens else ""
        closes = f' "\\n" "{self.closes}"' if self.closes else ""
        return f"start: {opens}({either}){closes}\n{rules}\n"

    def begins(self, text: str) -> int | None:
        """Where the first call of a text begins, or may yet turn out to begin."""
        if not self.opens:
            return 0 if text.lstrip()[:1] in ("", "{") else None
        at = text.find(self.opens)
        if at >= 0:
            return at
        ends = range(min(len(text), len(self.opens) - 1), 0, -1)
        return next((len(text) - n for n in ends if text.endswith(self.opens[:n])), None)

    def calls(self, text: str, tools: Sequence[Tool]) -> list[Call]:
        """The calls in a text that begins with one; none where it is not what it looked like."""
        pieces = [text]
        if self.opens:
            pieces = [piece.partition(self.closes)[0] for piece in text.split(self.opens)[1:]]
        known = {tool.function.name for tool in tools}
        calls = [self._call(piece, known) for piece in pieces]
        return [] if None in calls else [call for call in calls if call is not None]

    def _call(self, piece: str, known: set[str]) -> Call | None:
        try:
            found = json.loads(piece)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("name") not in known:
            return None
        arguments: Any = found.get(self.arguments, {})
        return Call(found["name"], json.dumps(arguments, ensure_ascii=False))


# Hermes, Qwen 2.5 and 3, and many that were trained after them; Llama 3.1 to 3.3.
_DIALECTS = (
    Dialect(mark="<tool_call>", opens="<tool_call>", closes="</tool_call>", arguments="arguments"),
    Dialect(mark='"parameters":', opens="", closes="", arguments="parameters"),
)


def dialect_of(template: str | None) -> Dialect | None:
    """How the model with this chat template writes calls; None where that is not known."""
    if template is None or "tools" not in template or "<function=" in template:
        return None
    return next((each for each in _DIALECTS if each.mark in template), None)
