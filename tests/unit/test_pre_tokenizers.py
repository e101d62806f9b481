"""Vocabularies of GGUF files split text as llama.cpp splits it, or as their makers do.

goldens/pre_tokenizers.json is written by scripts/pre_tokenizer_goldens.py with llama.cpp.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase
from transformers.integrations.gguf.gguf_tokenizer_mapping import get_merges

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.pre_tokenizers import PATTERNS, WHOLE_PIECES
from specexec_cli.models.gguf_tokenizer import build_gguf_tokenizer
from specexec_cli.models.merges import ImpliedMerges, ListedMerges

FOLDER = Path(__file__).parent.parent / "goldens"
GOLDENS = json.loads((FOLDER / "pre_tokenizers.json").read_text("utf-8"))
BEGIN = len(GOLDENS["tokens"]) - 1  # <s>
THAI, HINDI, COMBINING, CASES, SPACES, DIGITS = (
    next(text for text in GOLDENS["texts"] if part in text)
    for part in ("สวัสดี", "नमस्ते", "combining", "camelCase", "\u2003", "123456 1234567")
)
# Where llama.cpp says that it simplifies the makers' pattern, the makers' is used: it has no
# classes of capitals, small letters and marks, its \d is ASCII, and its \s has U+2028.
SIMPLIFIED = {
    "gpt-4o": {THAI, HINDI, COMBINING}, "tekken": {THAI, HINDI, COMBINING},
    "kimi-k2": {CASES, THAI, HINDI, COMBINING}, "tiny_aya": {CASES}, "youtu": {CASES},
    "deepseek-llm": {SPACES}, "deepseek-coder": {SPACES}, "superbpe": {DIGITS},
}  # fmt: skip


def tokenizer(name: str | None, **metadata: Any) -> PreTrainedTokenizerBase:
    described = {
        "general.architecture": "llama", "ggml.model": "gpt2", "ggml.tokens": GOLDENS["tokens"],
        "ggml.merges": GOLDENS["merges"], "ggml.token_type": [1] * BEGIN + [3],
        "ggml.bos_token_id": BEGIN, **metadata,
    }  # fmt: skip
    if name is not None:
        described["ggml.pre"] = name
    return build_gguf_tokenizer(Path("model.gguf"), described)


@pytest.mark.parametrize("group", GOLDENS["groups"], ids=lambda group: group["names"][0])
def test_text_is_split_as_by_llama_cpp(group: dict[str, Any]) -> None:
    simplified = SIMPLIFIED.get(group["names"][0], set())
    # each pattern once
    for name in {(PATTERNS[name], name in WHOLE_PIECES): name for name in group["names"]}.values():
        words = tokenizer(name)
        found = dict(zip(GOLDENS["texts"], group["ids"], strict=True))
        other = {
            text
            for text, ids in found.items()
            if words.encode(text, add_special_tokens=False) != ids
        }
        assert other == simplified, name
        assert all(words.decode(words.encode(text)).endswith(text) for text in found)


@pytest.mark.parametrize("words", GOLDENS["models"], ids=lambda words: words["ggml.model"])
def test_pieces_are_those_of_llama_cpp(words: dict[str, Any]) -> None:
    known = {key: value for key, value in words.items() if key != "ids"}
    found = build_gguf_tokenizer(Path("model.gguf"), {"general.architecture": "llama", **known})
    for text, ids in zip(GOLDENS["texts"], words["ids"], strict=True):
        assert found.encode(text, add_special_tokens=False) == ids
        assert found.decode(ids) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_goes_before_text_where_the_file_wants_it(prefix: bool) -> None:
    """At the beginning and behind a special token, as in a chat; in front of a space too."""
    known = {key: value for key, value in GOLDENS["models"][0].items() if key != "ids"}
    known |= {"general.architecture": "llama", "ggml.add_space_prefix": prefix}
    found = build_gguf_tokenizer(Path("model.gguf"), known)
    before = "\u2581" if prefix else ""
    assert "".join(found.tokenize("  ab</s>ab")) == f"{before}\u2581\u2581ab</s>{before}ab"
    assert found.decode(found.encode(" ab", add_special_tokens=False)) == " ab"


# names of llama.cpp's pre-tokenizers that no type that runs here has -> whose they are
OF_OTHERS = {
    **dict.fromkeys(
        ("granite-embed-multi-311m", "granite-embed-multi-97m", "jina-de", "jina-es", "jina-v1-en",
         "jina-v2-code", "jina-v2-de", "jina-v2-es", "modern-bert", "roberta-bpe", "whitespace"),
        "encoders, which write no text",
    ),
    "chameleon": "Chameleon, whose files are refused",
    "gemma4": "Gemma 4, by the name of its tokenizer; its goldens are among those of models",
    "glm5": "GLM-5, whose index over tokens is not computed",
    "sarvam-moe": "Sarvam-MoE, which transformers does not have",
}  # fmt: skip


def test_every_name_has_a_golden() -> None:
    assert sorted(name for group in GOLDENS["groups"] for name in group["names"]) == sorted(
        PATTERNS
    )


def test_the_names_are_those_of_llama_cpps_source() -> None:
    """As scripts/gguf_goldens.py read them there."""
    known = json.loads((FOLDER / "llama_cpp.json").read_text("utf-8"))["pre_tokenizers"]
    assert set(known) == PATTERNS.keys() | OF_OTHERS.keys()
    assert not PATTERNS.keys() & OF_OTHERS.keys()
    assert "gemma4" in {words["ggml.model"] for words in GOLDENS["models"]}


def test_a_file_that_names_none_is_split_as_llama_cpp_does_by_default() -> None:
    text = GOLDENS["texts"][0]
    assert tokenizer(None).encode(text) == tokenizer("default").encode(text)
    assert tokenizer(None).encode(text) != tokenizer("gpt-2").encode(text)


@pytest.mark.parametrize(("name", "begins"), [("llama-bpe", True), ("qwen2", False)])
def test_the_first_token_follows_the_name_unless_the_file_says_it(name: str, begins: bool) -> None:
    assert (tokenizer(name).encode("a")[0] == BEGIN) is begins
    stated = tokenizer(name, **{"ggml.add_bos_token": not begins})
    assert (stated.encode("a")[0] == BEGIN) is not begins


def test_an_unknown_name_is_refused_in_one_line() -> None:
    with pytest.raises(CheckpointError, match=r"model\.gguf: how its tokenizer 'nobody' splits"):
        tokenizer("nobody")


@pytest.mark.parametrize("by_place", [False, True])
def test_merges_are_those_that_transformers_finds(by_place: bool) -> None:
    """In its order, where scores tie too, all at once and one by one."""
    rng = np.random.default_rng(0)
    words = {"".join(rng.choice(list("abc▁"), rng.integers(1, 6))) for _ in range(400)}
    tokens = sorted(words)
    scores = rng.integers(-40, 0, len(tokens)).astype(float).tolist()
    places = {token: -place for place, token in enumerate(tokens)} if by_place else None
    expected = get_merges({"tokens": tokens, "scores": scores}, places)
    ids = {token: index for index, token in enumerate(tokens)}
    found = ImpliedMerges(ids, None if by_place else scores)
    assert found.all() == expected
    assert len(expected) > 100
    assert sorted(expected, key=lambda pair: found.rank(ids["".join(pair)], *pair)) == expected


def test_one_very_long_token_takes_no_longer_than_others() -> None:
    ids = {"a": 0, "b": 1, "ab": 2, "": 3, "x" * 300_000: 4}
    start = time.process_time()
    assert ImpliedMerges(ids, None).all() == [("a", "b")]
    assert time.process_time() - start < 5, "each place in it was tried"


@pytest.mark.parametrize("wrong", ["a", "a b c", "a x", "b a"])
def test_a_merge_that_makes_no_token_is_told(wrong: str) -> None:
    ids = {"a": 0, "b": 1, "ab": 2}
    assert ListedMerges(["a b"], ids).all() == [("a", "b")]
    with pytest.raises(ValueError, match="a merge is not of two tokens"):
        ListedMerges(["a b", wrong], ids)


@pytest.mark.parametrize("scores", [[0.0], [0.0, float("nan")]])
def test_a_vocabulary_without_scores_tells_no_order(scores: list[float]) -> None:
    with pytest.raises(ValueError, match="no score"):
        ImpliedMerges({"a": 0, "b": 1}, scores)
