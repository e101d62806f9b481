"""A grammar's constraint depends on the context alone, whatever it was asked before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specexec_cli.config import SamplingConfig
from specexec_cli.drafting.scoring import DraftScorer
from specexec_cli.errors import ConfigError
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.sampling import Sampler
from specexec_cli.serve import grammar
from specexec_cli.serve.bodies import Tool
from specexec_cli.serve.grammar import GrammarMaker
from specexec_cli.serve.tool_dialects import HERMES, LLAMA
from specexec_cli.serve.tools import JsonDialect

DEMO = Path(__file__).parents[2] / "specexec_cli" / "demo" / "target"
TOKENIZER = load_tokenizer(DEMO)
EOS = TOKENIZER.eos_token_id
MAKER = GrammarMaker(TOKENIZER, 4096, [EOS])
GRAMMAR = MAKER.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
TEXT = [*TOKENIZER.encode('{"a": 12, "b": [true]}', add_special_tokens=False), EOS]


def allowed(constraint: object, length: int, prompt: int = 3) -> set[int]:
    mask = constraint.allowed([5] * prompt + TEXT[:length])  # type: ignore[attr-defined]
    return set(mask.nonzero().flatten().tolist())


@given(lengths=st.lists(st.integers(0, len(TEXT)), min_size=1, max_size=12))
def test_the_order_of_questions_does_not_matter(lengths: list[int]) -> None:
    asked = MAKER.constraint(GRAMMAR, 3)
    for length in lengths:
        assert allowed(asked, length) == allowed(MAKER.constraint(GRAMMAR, 3), length)


def test_every_token_of_a_fitting_text_is_allowed_and_others_are_not() -> None:
    constraint = MAKER.constraint(GRAMMAR, 0)
    for length, token in enumerate(TEXT):
        assert token in allowed(constraint, length, prompt=0)
    assert allowed(constraint, len(TEXT) - 1, prompt=0) == {EOS}
    assert allowed(constraint, len(TEXT), prompt=0) == {EOS}, "drafts may look behind the end"
    letter = TOKENIZER.encode("x", add_special_tokens=False)[-1]
    assert letter not in allowed(constraint, 0, prompt=0)
    assert EOS not in allowed(constraint, 3, prompt=0)


def test_the_sampler_draws_what_is_allowed_and_the_drafter_too() -> None:
    torch.manual_seed(0)
    for temperature in (0.0, 1.0):
        for seed in range(20):
            config = SamplingConfig(temperature=temperature, seed=seed)
            sampler = Sampler(config, MAKER.constraint(GRAMMAR, 2))
            logits = torch.randn(2, 4096) * 4
            token = sampler.token(logits[0], [5, 5])
            assert token in allowed(MAKER.constraint(GRAMMAR, 0), 0, prompt=0)
            scorer = DraftScorer(sampler, "noise")
            rows = scorer.utilities(logits, [2, 5], [5, 5], [(), TEXT[:3]])
            for row, length in zip(rows, (0, 3), strict=True):
                kept = set(torch.isfinite(row).nonzero().flatten().tolist())
                assert kept == allowed(MAKER.constraint(GRAMMAR, 0), length, prompt=0)


def test_a_smaller_or_larger_vocabulary() -> None:
    sampler = Sampler(SamplingConfig(), MAKER.constraint(GRAMMAR, 1))
    assert sampler.filtered(torch.zeros(1, 5000), [5])[0, 4096:].isneginf().all()
    assert sampler.filtered(torch.zeros(1, 300), [5]).shape == (1, 300)


@pytest.mark.parametrize(
    "schema",
    [{"type": "frob"}, {"$ref": "http://example.com/x"}, {"$ref": "file:///etc/passwd"},
     {"type": "string", "pattern": "("}],
)  # fmt: skip
def test_schemas_that_cannot_be_used(schema: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="the JSON schema cannot be used"):
        MAKER.json_schema(schema)


def test_a_schema_of_any_size_is_not_kept() -> None:
    with pytest.raises(ConfigError, match="more than 200000 characters"):
        MAKER.json_schema({"enum": ["x" * 300_000]})


def test_a_schema_that_takes_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty of these patterns take llguidance minutes, whatever limits it is given."""
    monkeypatch.setattr(grammar, "_MOST_CHECK_S", 1.0)
    patterns = [{"type": "string", "pattern": f"a.*{number}"} for number in range(30)]
    with pytest.raises(ConfigError, match="more than 1 s to read"):
        MAKER.json_schema({"allOf": patterns})


def fits(constraint: grammar.GrammarConstraint, text: str) -> bool:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    return all(
        token in set(constraint.allowed(tokens[:at]).nonzero().flatten().tolist())
        for at, token in enumerate(tokens)
    )


@pytest.mark.parametrize("dialect", [HERMES, LLAMA])
def test_references_in_parameters_begin_at_their_root(dialect: JsonDialect) -> None:
    parameters = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/I"}, "rest": {"$ref": "#"}},
        "$defs": {"I": {"type": "integer"}},
        "additionalProperties": False,
    }
    function = {"name": "sum-up.2", "parameters": parameters}
    tool = Tool.model_validate({"type": "function", "function": function})
    calls = MAKER.lark(dialect.grammar([tool], MAKER.spelled))
    opens, closes = (f"{dialect.opens}\n", f"\n{dialect.closes}") if dialect.opens else ("", "")
    for arguments, right in (('{"n": 1, "rest": {"n": 2}}', True), ('{"n": "x"}', False)):
        call = f'{opens}{{"name": "sum-up.2", "{dialect.arguments}": {arguments}}}{closes}'
        assert fits(MAKER.constraint(calls, 0), call) is right


@pytest.mark.parametrize("liked", ["\n", " ", "\t"])
def test_json_is_compact_whatever_a_model_prefers(liked: str) -> None:
    """A model that prefers white space to anything else gets on with its JSON."""
    space = TOKENIZER.encode(liked, add_special_tokens=False)[-1]
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "minItems": 3,
                             "maxItems": 3}, "b": {"enum": [None]}},
        "required": ["a", "b"], "additionalProperties": False,
    }  # fmt: skip
    for seed in range(10):
        torch.manual_seed(seed)
        constraint = MAKER.constraint(MAKER.json_schema(schema), 1)
        sampler = Sampler(SamplingConfig(temperature=1.0, seed=seed), constraint)
        context = [5]
        while context[-1] != EOS:
            logits = torch.randn(4096)
            logits[space] = 50.0
            context.append(sampler.token(logits, context))
            assert len(context) < 200
        text = TOKENIZER.decode(context[1:-1])
        assert text == json.dumps(json.loads(text))
        assert list(json.loads(text)) == ["a", "b"]


def test_a_schema_without_properties_is_any_json() -> None:
    constraint = MAKER.constraint(MAKER.json_schema({}), 0)
    for value in ("[1, null]", '"x"', "-3.5e2"):
        tokens = TOKENIZER.encode(value, add_special_tokens=False)
        for at, token in enumerate(tokens):
            assert token in set(constraint.allowed(tokens[:at]).nonzero().flatten().tolist())
        json.loads(value)
