"""Mistral's tool calls: a special token, then a list of JSON objects or a name and its arguments.

Models up to Mistral Small 3.1 write `[TOOL_CALLS] [{"name": ..., "arguments": ..., "id": ...}]`,
later ones `[TOOL_CALLS]name[ARGS]{...}` for each call, with or without `[ARGS]`, and with or
without `[CALL_ID]` and an id before it.
Source: the chat templates of mistralai/Mistral-Nemo-Instruct-2407 and
Mistral-Small-3.1-24B-Instruct-2503; mistral-common, tokenizers v11 and v13.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specexec_cli.guarded import parse_json
from specexec_cli.serve.bodies import Tool
from specexec_cli.serve.tools import (
    Call,
    Dialect,
    Spell,
    all_or_none,
    either_of,
    json_call,
    json_rule,
    names_of,
    read_object,
    written,
)

_NAMED = re.compile(
    r"([\w.-]+)(?:\[CALL_ID\]([A-Za-z0-9]+))?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL
)
_ID = re.compile(r"[A-Za-z0-9]{9}")  # templates refuse other ids


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralDialect(Dialect):
    """Calls in one JSON list, or one call after another."""

    opens = "[TOOL_CALLS]"

    named: bool  # the template has [ARGS] between a name and its arguments

    def grammar(self, tools: Sequence[Tool], spell: Spell) -> str:
        """See Dialect."""
        if self.named:
            calls = [
                f"{json.dumps(tool.function.name)} {spell('[ARGS]')} "
                f"{json_rule(tool.function.parameters or {'type': 'object'})}"
                for tool in tools
            ]
            return either_of(calls, f"{spell(self.opens)} call")
        own_id = json.dumps(', "id": "') + f" /{_ID.pattern}/ " + json.dumps('"}')
        calls = [f"{json_call(tool, 'arguments')} {own_id}" for tool in tools]
        return either_of(calls, f'{spell(self.opens)} / ?/ "[" call "]"')

    def calls(self, text: str, tools: Sequence[Tool]) -> list[Call]:
        """See Dialect."""
        known, found = names_of(tools), []
        for piece in text.split(self.opens)[1:]:
            if piece.lstrip().startswith("["):
                found += _listed(piece, known)
            else:
                found.append(_named(piece.strip(), known))
        return all_or_none(found)


def _listed(piece: str, known: set[str]) -> list[Call | None]:
    try:
        calls = parse_json(piece)
    except ValueError:
        return [None]
    return [_call(each, known) for each in calls] or [None]


def _call(found: Any, known: set[str]) -> Call | None:
    if not isinstance(found, dict) or found.get("name") not in known:
        return None
    return Call(found["name"], written(found.get("arguments", {})), _own_id(found.get("id")))


def _named(piece: str, known: set[str]) -> Call | None:
    match = _NAMED.fullmatch(piece)
    arguments = read_object(match[3]) if match is not None else None
    if match is None or arguments is None or match[1] not in known:
        return None
    return Call(match[1], written(arguments), _own_id(match[2]))


def _own_id(written_id: Any) -> str:
    """The id that the model gave a call, or a new id of the same form."""
    own = isinstance(written_id, str) and _ID.fullmatch(written_id) is not None
    return str(written_id) if own else uuid.uuid4().hex[:9]
