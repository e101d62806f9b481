"""Tool calls of GLM and Qwen3-Coder, with each argument between tags.

Strings are written as they are, and other values as JSON. The tool's schema says which of the two a
value is.
Source: the chat templates of zai-org/GLM-4.5, GLM-4.6 and GLM-4.7, and of
Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specexec_cli.guarded import parse_json
from specexec_cli.serve.bodies import Tool
from specexec_cli.serve.tools import (
    Call,
    Dialect,
    Spell,
    all_or_none,
    either_of,
    json_rule,
    written,
)

_LITERALS = {"True": True, "False": False}  # Qwen's template writes booleans of earlier calls so


@dataclass(frozen=True, slots=True, kw_only=True)
class TagDialect(Dialect):
    """A dialect of a function's name, then each argument's name and value."""

    opens = "<tool_call>"
    closes = "</tool_call>"

    name: re.Pattern[str]  # matches all before the arguments; the group is the function's name
    argument: re.Pattern[str]  # matches an argument; the groups are its name and its value
    end: re.Pattern[str]  # matches all between the last argument and the closing mark
    # the texts, for writing a call, around the function's name and around an argument's name
    before_name: str
    behind_name: str
    before_key: str
    behind_key: str
    behind_value: str  # the end mark of a value
    last: str

    def grammar(self, tools: Sequence[Tool], spell: Spell) -> str:
        """See Dialect. For strings only the schema's `enum` and `const` are enforced."""
        rules = [f"text[suffix={json.dumps(self.behind_value)}]: /(?s:.*)/"]
        calls = []
        for tool in tools:
            schema = tool.function.parameters or {}
            required = schema.get("required")
            required = required if isinstance(required, list) else []
            parts = [json.dumps(f"{self.before_name}{tool.function.name}{self.behind_name}")]
            for key, wanted in _properties(tool).items():
                rules.append(f"value{len(rules)}: {self._value(wanted, schema)}")
                before = json.dumps(f"{self.before_key}{key}{self.behind_key}")
                both = f"{before} value{len(rules) - 1} /\\n?/"
                parts.append(both if key in required else f"({both})?")
            calls.append(" ".join(parts))
        last = json.dumps(self.last) if self.last else ""
        start = f"{spell(self.opens)} call {last} {spell(self.closes)}"
        return either_of(calls, start) + "\n".join(rules) + "\n"

    def _value(self, wanted: Any, root: Mapping[str, Any]) -> str:
        """A Lark expression for an argument's value and its end mark."""
        end = json.dumps(self.behind_value)
        wanted = wanted if isinstance(wanted, dict) else {}
        if _may_be_text(wanted):
            return "text"
        if not _is_text(wanted):
            definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
            return f"{json_rule({**definitions, **wanted})} {end}"
        texts = [json.dumps(each) for each in _listed(wanted) if isinstance(each, str)]
        return f"({' | '.join(texts)}) {end}" if texts else "text"

    def calls(self, text: str, tools: Sequence[Tool]) -> list[Call]:
        """See Dialect."""
        known = {tool.function.name: tool for tool in tools}
        pieces = [piece.partition(self.closes)[0] for piece in text.split(self.opens)[1:]]
        return all_or_none([self._call(piece, known) for piece in pieces])

    def _call(self, piece: str, known: Mapping[str, Tool]) -> Call | None:
        named = self.name.match(piece)
        tool = known.get(named[1]) if named is not None else None
        if named is None or tool is None:
            return None
        at, arguments = named.end(), {}
        while (found := self.argument.match(piece, at)) is not None:
            key, value = found.groups()
            arguments[key] = _read(value, _properties(tool).get(key))
            at = found.end()
        if self.end.fullmatch(piece, at) is None:
            return None
        return Call(tool.function.name, written(arguments))


def _properties(tool: Tool) -> Mapping[str, Any]:
    """The schemas of a tool's arguments by name."""
    found = (tool.function.parameters or {}).get("properties")
    return found if isinstance(found, dict) else {}


def _listed(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists one by one."""
    known = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return known if isinstance(known, list) else []


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a schema allows only strings, which are written as they are."""
    if "type" in schema:
        return bool(schema["type"] == "string")
    known = _listed(schema)
    return bool(known) and all(isinstance(each, str) for each in known)


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a schema lists several types, strings among them."""
    return isinstance(schema.get("type"), list) and "string" in schema["type"]


def _read(value: str, schema: Any) -> Any:
    """An argument's value: a string if the schema says so or if the value is not JSON."""
    schema = schema if isinstance(schema, dict) else {}
    if _is_text(schema):
        return value
    if schema.get("type") == "boolean" and value.strip() in _LITERALS:
        return _LITERALS[value.strip()]
    try:
        found = parse_json(value)
    except ValueError:
        return value
    # If the schema allows strings too, every value but null is read as a string: templates write
    # a string and another value in the same way.
    return value if _may_be_text(schema) and found is not None else found


GLM = TagDialect(
    name=re.compile(r"\s*([^\s<]+)\s*"),
    argument=re.compile(
        r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
    ),
    end=re.compile(r"\s*"),
    before_name="", behind_name="\n",
    before_key="<arg_key>", behind_key="</arg_key>\n<arg_value>", behind_value="</arg_value>",
    last="",
)  # fmt: skip
# the dialect of GLM-4.7 and later
GLM_IN_ONE_LINE = replace(GLM, behind_name="", behind_key="</arg_key><arg_value>")
QWEN_CODER = TagDialect(
    name=re.compile(r"\s*<function=([^\s>]+)>\s*"),
    argument=re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL),
    end=re.compile(r"</function>\s*"),
    before_name="\n<function=", behind_name=">\n",
    before_key="<parameter=", behind_key=">\n", behind_value="\n</parameter>",
    last="</function>\n",
)  # fmt: skip
