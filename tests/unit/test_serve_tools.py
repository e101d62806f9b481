"""Calls in the form of each family: seen from its template, read back, and held to by a grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tool_templates import OTHERS, TEMPLATES, WEATHER
from transformers import PreTrainedTokenizerBase

from specexec_cli.models.text import TextStream
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.serve.bodies import Tool
from specexec_cli.serve.grammar import GrammarMaker
from specexec_cli.serve.tool_dialects import HERMES, dialect_of
from specexec_cli.serve.tools import Dialect

DEMO = Path(__file__).parents[2] / "specexec_cli" / "demo" / "target"
NOTE = Tool.model_validate(
    {
        "type": "function",
        "function": {
            "name": "take_note",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "code": {"type": "string"},
                    "times": {"type": "integer"},
                    "loud": {"type": "boolean"},
                    "where": {"type": ["string", "null"]},
                    "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
                },
                "required": ["text"],
                "$defs": {"tag": {"type": "string"}},
            },
        },
    }
)
CLOCK = Tool.model_validate({"type": "function", "function": {"name": "clock"}})
TOOLS = [NOTE, CLOCK]
# strings that look like something else, and something else
ARGUMENTS = {
    "text": "zwei\nZeilen, <b>fett</b> & \"quoted\" {}", "code": "12", "times": 3, "loud": True,
    "where": "null island", "tags": ["a", "é"],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(DEMO)
    tokenizer.add_tokens(["[TOOL_CALLS]", "[ARGS]"], special_tokens=True)
    return tokenizer


@pytest.fixture(params=sorted(TEMPLATES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def known(family: str) -> Dialect:
    found = dialect_of(TEMPLATES[family])
    assert found is not None
    return found


def reply(tokenizer: PreTrainedTokenizerBase, family: str, calls: list[dict[str, Any]]) -> str:
    """What a model wrote that made these calls, as its template tells it again."""
    told = [
        {"id": f"call{index:05d}", "type": "function", "function": call}
        for index, call in enumerate(calls)
    ]
    messages = [{"role": "assistant", "content": "", "tool_calls": told}]
    text = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATES[family], tokenize=False, tools=None
    )
    assert isinstance(text, str)
    return text.partition("<|assistant|>")[2].removesuffix("<|end|>")


def test_each_family_has_its_own_dialect() -> None:
    found = {family: known(family) for family in TEMPLATES}
    assert found["hermes"] is found["qwen-escaped"] is HERMES
    assert found["mistral-nemo"] is found["mistral-small"]
    assert len({id(each) for each in found.values()}) == 7
    assert dialect_of(None) is None
    assert dialect_of("{{ messages }}<tool_call><arg_key><arg_value>") is None, "it tells no tools"


@pytest.mark.parametrize("family", sorted(OTHERS))
def test_forms_that_are_not_read_are_known_for_it(family: str) -> None:
    assert dialect_of(OTHERS[family]) is None


def test_calls_are_read_back(tokenizer: PreTrainedTokenizerBase, family: str) -> None:
    calls = [
        {"name": "take_note", "arguments": ARGUMENTS}, {"name": "clock", "arguments": {}}
    ][: 1 if family == "llama" else 2]  # fmt: skip
    text, dialect = reply(tokenizer, family, calls), known(family)
    begins = dialect.begins(text)
    assert begins is not None
    assert text[:begins].strip() == ""
    found = dialect.calls(text[begins:], TOOLS)
    assert [call.name for call in found] == [call["name"] for call in calls]
    assert json.loads(found[0].arguments) == ARGUMENTS
    assert [json.loads(call.arguments) for call in found[1:]] == [{}] * (len(calls) - 1)
    if family.startswith("mistral"):
        assert [call.id for call in found] == ["call00000", "call00001"]
    if family == "ministral":
        assert all(len(call.id) == 9 and call.id.isalnum() for call in found)


def test_what_is_no_call_of_a_tool_is_none(tokenizer: PreTrainedTokenizerBase, family: str) -> None:
    dialect = known(family)
    right = reply(tokenizer, family, [{"name": "take_note", "arguments": {"text": "x"}}]).strip()
    assert dialect.calls(right, TOOLS)
    assert dialect.calls(right, [CLOCK]) == []
    assert dialect.calls(right.replace("take_note", "rm"), TOOLS) == []
    assert dialect.calls(right[: right.index("x")], TOOLS) == []


def test_booleans_as_python_writes_them() -> None:
    text = (
        "<tool_call>\n<function=take_note>\n<parameter=loud>\nFalse\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    (call,) = known("qwen-coder").calls(text, TOOLS)
    assert json.loads(call.arguments) == {"loud": False}


def test_a_grammar_allows_what_is_read_back(
    tokenizer: PreTrainedTokenizerBase, family: str
) -> None:
    dialect = known(family)
    maker = GrammarMaker(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    grammar = maker.lark(dialect.grammar([NOTE, Tool.model_validate(WEATHER)], maker.spelled))

    def allowed(call: dict[str, Any]) -> bool:
        text = reply(tokenizer, family, [call]).strip()
        matcher = grammar.deep_copy()
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return matcher.validate_tokens(tokens) == len(tokens) and (
            matcher.consume_tokens(tokens) and matcher.is_accepting()
        )

    assert allowed({"name": "take_note", "arguments": ARGUMENTS})
    assert allowed({"name": "take_note", "arguments": {"text": ""}})
    assert allowed({"name": "weather", "arguments": {"day": "today"}})
    assert not allowed({"name": "weather", "arguments": {"day": "never"}})
    assert not allowed({"name": "weather", "arguments": {}})
    assert not allowed({"name": "take_note", "arguments": {"text": "x", "times": "three"}})
    assert not allowed({"name": "other", "arguments": {}})


def test_marks_that_are_special_tokens_are_told(tokenizer: PreTrainedTokenizerBase) -> None:
    text = '[TOOL_CALLS]clock[ARGS]{"a": 1}'
    stream = TextStream(tokenizer, [], ())
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == 'clock{"a": 1}'
    assert "".join(stream.push(token) for token in tokens) + stream.finish() == text
