"""Dialects of tool calls: grammars to write a call, and functions to read calls back.

A model's chat template tells the model about the tools and how to call them; the marks in the
template show the dialect. Calls in plain JSON are handled here, calls with arguments between tags
in tool_tags.py, and Mistral's calls in tool_lists.py.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specexec_cli.guarded import parse_json
from specexec_cli.serve.bodies import Tool

# writes a mark in llguidance's dialect of Lark: as a special token, or as its letters
Spell = Callable[[str], str]

# llguidance's options for JSON in one line, with the spaces that templates write and models have
# learned. A model that might write white space where it likes may write it for ever.
ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function."""

    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class Dialect(ABC):
    """The way in which one family of models writes calls.

    Attributes:
        opens: the mark before a call. If it is empty, a reply that begins with "{" is a call.
    """

    opens: str

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], spell: Spell) -> str:
        """A grammar for exactly one call of one of the tools, in llguidance's dialect of Lark."""

    @abstractmethod
    def calls(self, text: str, tools: Sequence[Tool]) -> list[Call]:
        """The calls in a text that begins with a call; empty if one of them is invalid."""

    def begins(self, text: str) -> int | None:
        """The index at which a text's first call begins, or may begin; None if there is none."""
        if not self.opens:
            return 0 if text.lstrip()[:1] in ("", "{") else None
        at = text.find(self.opens)
        if at >= 0:
            return at
        ends = range(min(len(text), len(self.opens) - 1), 0, -1)
        return next((len(text) - n for n in ends if text.endswith(self.opens[:n])), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonDialect(Dialect):
    """JSON objects between marks (Hermes, Qwen), or one object as the whole reply (Llama 3)."""

    opens: str
    closes: str
    arguments: str  # the key of the arguments

    def grammar(self, tools: Sequence[Tool], spell: Spell) -> str:
        """See Dialect."""
        opens = f'{spell(self.opens)} "\\n" ' if self.opens else ""
        closes = f' "\\n" {spell(self.closes)}' if self.closes else ""
        calls = [f'{json_call(tool, self.arguments)} "}}"' for tool in tools]
        return either_of(calls, f"{opens}(call){closes}")

    def calls(self, text: str, tools: Sequence[Tool]) -> list[Call]:
        """See Dialect."""
        pieces = [text]
        if self.opens:
            pieces = [piece.partition(self.closes)[0] for piece in text.split(self.opens)[1:]]
        return all_or_none([self._call(piece, names_of(tools)) for piece in pieces])

    def _call(self, piece: str, known: set[str]) -> Call | None:
        found = read_object(piece)
        if found is None or found.get("name") not in known:
            return None
        return Call(found["name"], written(found.get(self.arguments, {})))


def names_of(tools: Sequence[Tool]) -> set[str]:
    """The names of the tools' functions."""
    return {tool.function.name for tool in tools}


def all_or_none(calls: Sequence[Call | None]) -> list[Call]:
    """The calls of one reply, or an empty list if one of them is invalid (None)."""
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else []


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object in a text; None if the text is no JSON object."""
    try:
        found = parse_json(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def written(arguments: Any) -> str:
    """A call's arguments as JSON text, as clients expect them."""
    return json.dumps(arguments, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any]) -> str:
    """A Lark expression for JSON in one line."""
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE})}"


def json_call(tool: Tool, arguments: str) -> str:
    """A Lark expression for a call as a JSON object without its last brace.

    The parameters keep a schema of their own, because its references start at its root.

    Args:
        arguments: the key of the arguments.
    """
    before = f'{{"name": {json.dumps(tool.function.name)}, "{arguments}": '
    return f"{json.dumps(before)} {json_rule(tool.function.parameters or {'type': 'object'})}"


def either_of(calls: Sequence[str], start: str) -> str:
    """A Lark grammar in which the rule `call` is any of these calls."""
    names = [f"call{index}" for index in range(len(calls))]
    rules = "\n".join(f"{name}: {call}" for name, call in zip(names, calls, strict=True))
    return f"start: {start}\ncall: {' | '.join(names)}\n{rules}\n"
