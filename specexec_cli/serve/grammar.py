"""Compiles grammars for JSON mode and tools, and says which tokens may follow (llguidance)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specexec_cli.core import common_prefix
from specexec_cli.errors import ConfigError
from specexec_cli.serve.tools import ONE_LINE

# llguidance's own limits do not cover all work on regular expressions, which a small schema can
# make exponential. Only ending its process stops such work.
_MOST_CHECK_S = 5.0
_CHECK = (
    "import sys; from llguidance import LLMatcher; "
    "sys.stdout.write(LLMatcher.validate_grammar(sys.stdin.read()))"
)
_MOST_CHARACTERS = 200_000  # most characters of a grammar, since grammars are kept
_KEPT = 16  # kept grammars, since most requests of a program have the same one


class GrammarMaker:
    """Makes constraints for the texts of one model.

    Args:
        vocab_size: number of tokens that the target knows.
    Raises:
        ConfigError: llguidance cannot read this tokenizer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: Collection[int]
    ) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(
                "this model's tokenizer has no tokenizer.json, which JSON mode needs: leave "
                "response_format and tool_choice out"
            )
        if not eos_ids:
            raise ConfigError("this model has no end-of-text token, which JSON mode needs")
        size = max(vocab_size, len(tokenizer))
        self._eos_ids = sorted(eos_ids)
        self._tokens = llguidance.hf.from_tokenizer(tokenizer, size, list(self._eos_ids))
        self._special = {
            token.content: index
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self._compiled = lru_cache(maxsize=_KEPT)(self._compile)

    def json_schema(self, schema: Mapping[str, Any] | bool) -> LLMatcher:
        """Compiles the grammar of the JSON that a schema allows; may take seconds.

        Raises:
            ConfigError: the schema cannot be used; the message says why.
        """
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=ONE_LINE)
        except ValueError as error:
            raise ConfigError(f"the JSON schema cannot be used: {error}") from error
        return self._compiled(grammar, "the JSON schema")

    def lark(self, text: str) -> LLMatcher:
        """Compiles a grammar in llguidance's dialect of Lark; may take seconds.

        Raises:
            ConfigError: the grammar cannot be used; the message says why.
        """
        return self._compiled(LLMatcher.grammar_from_lark(text), "the tools' parameters")

    def spelled(self, mark: str) -> str:
        """A mark in llguidance's dialect of Lark: the special token, or the mark's letters."""
        index = self._special.get(mark)
        return json.dumps(mark) if index is None else f"<[{index}]>"

    def constraint(self, grammar: LLMatcher, prompt_tokens: int) -> GrammarConstraint:
        """A constraint for one text, which begins after `prompt_tokens` tokens."""
        return GrammarConstraint(grammar.deep_copy(), self._eos_ids, prompt_tokens)

    def _compile(self, grammar: str, what: str) -> LLMatcher:
        if len(grammar) > _MOST_CHARACTERS:
            raise ConfigError(f"{what} cannot be used: more than {_MOST_CHARACTERS} characters")
        failure = _checked_apart(grammar)
        if not failure:
            matcher = LLMatcher(self._tokens, grammar, log_level=0)
            if not matcher.is_error():
                return matcher
            failure = matcher.get_error()
        raise ConfigError(f"{what} cannot be used: {' '.join(failure.split())[:300]}")


def _checked_apart(grammar: str) -> str:
    """Checks a grammar in a process that can be ended; returns its error, or an empty text."""
    try:
        found = subprocess.run(
            [sys.executable, "-P", "-c", _CHECK],
            input=grammar, capture_output=True, encoding="utf-8", timeout=_MOST_CHECK_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it takes more than {_MOST_CHECK_S:g} s to read: make its patterns simpler"
    if found.returncode:
        return f"reading it failed with exit {found.returncode}"
    return found.stdout


class GrammarConstraint:
    """Follows one text, and every path of its draft trees, through a grammar."""

    def __init__(self, matcher: LLMatcher, eos_ids: Sequence[int], prompt_tokens: int) -> None:
        self._matcher = matcher
        self._eos_ids = list(eos_ids)
        self._prompt_tokens = prompt_tokens
        self._taken: list[int] = []  # tokens that the matcher has taken, up to the grammar's end

    def allowed(self, context: Sequence[int]) -> Tensor:
        """See sampling.Constraint."""
        text = list(context[self._prompt_tokens :])
        shared = common_prefix(self._taken, text)
        if shared < len(self._taken):
            self._matcher.rollback(len(self._taken) - shared)
            del self._taken[shared:]
        for token in text[shared:]:
            if self._matcher.is_stopped():
                break
            self._matcher.consume_token(token)
            self._taken.append(token)
        if self._matcher.is_stopped() and not self._matcher.is_error():
            bits = np.zeros(max(self._eos_ids) + 1, dtype=np.bool_)
            bits[self._eos_ids] = True
            return torch.from_numpy(bits)
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())[:300]
            raise ConfigError(f"the grammar cannot be followed any further: {reason}")
        found: NDArray[np.uint8] = np.unpackbits(
            np.frombuffer(mask, dtype=np.uint8), bitorder="little"
        )
        return torch.from_numpy(found.astype(np.bool_))
