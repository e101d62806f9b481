"""A vocabulary that grows with its texts makes the tokens that the whole one makes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from specexec_cli.models.growing_vocabulary import GrowingTokenizer, GrowingVocabulary
from specexec_cli.models.merges import ImpliedMerges, ListedMerges

GOLDENS = json.loads(
    (Path(__file__).parent.parent / "goldens" / "pre_tokenizers.json").read_text("utf-8")
)
TEXTS = GOLDENS["texts"]
BYTES = [f"<0x{n:02X}>" for n in range(256)]


def byte_level(*, whole_pieces: bool) -> Tokenizer:
    """As of Llama 3 (whole pieces) or Qwen: bytes, and NFC before them."""
    words = Tokenizer(models.BPE(ignore_merges=whole_pieces))
    words.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_of])
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(TEXTS, BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    words.add_special_tokens(["<s>", "<|end|>"])
    words.add_tokens(["    ", AddedToken("tag", normalized=True)])
    return words


def pieces(prefix: bool) -> Tokenizer:
    """As of Llama 2 (a space in front) or Gemma: characters, and bytes for those it lacks."""
    words = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "\u2581")
    words.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), space]) if prefix else space
    )
    words.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "<|end|>", *BYTES], limit_alphabet=250
    )
    words.train_from_iterator(TEXTS[:20], trainer)
    stored = json.loads(words.to_str())
    stored["added_tokens"] = stored["added_tokens"][:3]  # bytes are tokens like others
    found = Tokenizer.from_str(json.dumps(stored))
    found.add_tokens(["tag", "\u2581\u2581\u2581\u2581"])
    return found


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: byte_level(whole_pieces=False),
    "whole pieces": lambda: byte_level(whole_pieces=True),
    "pieces": lambda: pieces(prefix=False),
    "pieces behind a space": lambda: pieces(prefix=True),
}
MADE: dict[str, tuple[Tokenizer, dict[str, Any]]] = {}


def made(kind: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A whole tokenizer, and its JSON."""
    if kind not in MADE:
        # added tokens are in the model too, as in every GGUF file
        stored = json.loads(KINDS[kind]().to_str())
        vocabulary = stored["model"]["vocab"]
        vocabulary |= {each["content"]: each["id"] for each in stored["added_tokens"]}
        MADE[kind] = Tokenizer.from_str(json.dumps(stored)), stored
    return MADE[kind]


def grown(stored: dict[str, Any]) -> GrowingVocabulary:
    words: dict[str, int] = stored["model"]["vocab"]
    ids = {word: words[word] for word in sorted(words, key=words.__getitem__)}
    merges = ListedMerges([" ".join(pair) for pair in stored["model"]["merges"]], ids)
    return GrowingVocabulary(stored, ids, merges)


def opened(kind: str, **options: Any) -> tuple[GrowingTokenizer, Any]:
    """The tokenizer that grows, and transformers' own over the whole."""
    whole, stored = made(kind)
    known = {"bos_token": "<s>", "eos_token": "<|end|>", "add_bos_token": True, **options}
    growing = GrowingTokenizer(grown(stored), **known)
    return growing, PreTrainedTokenizerFast(tokenizer_object=whole, **known)


CHARACTERS = "ab e\u0301\u00e9\u2581 \t\n.,12<>s|end/tagTAG\U0001f469\u200d\u4f60\u597dZ\x00"


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(texts=st.lists(st.text(CHARACTERS, max_size=60) | st.sampled_from(TEXTS), max_size=4))
def test_the_tokens_are_those_of_the_whole(kind: str, texts: list[str]) -> None:
    growing, whole = opened(kind)
    for text in texts:
        ids = whole.encode(text)
        assert growing.encode(text) == ids
        assert growing(text, add_special_tokens=False) == whole(text, add_special_tokens=False)
        for skip in (False, True):
            assert growing.decode(ids, skip_special_tokens=skip) == whole.decode(
                ids, skip_special_tokens=skip
            )
    assert growing.decode(range(len(whole))) == whole.decode(range(len(whole)))
    assert growing.decode([len(whole), 5]) == whole.decode([len(whole), 5])
    assert not growing.is_whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_text_needs_no_more_than_its_tokens(kind: str) -> None:
    growing, whole = opened(kind)
    growing.encode("Hello world")
    assert growing.eos_token_id == whole.eos_token_id
    assert growing.added_tokens_decoder == whole.added_tokens_decoder
    assert growing.get_added_vocab() == whole.get_added_vocab()
    assert growing.get_vocab() == whole.get_vocab()
    assert not growing.is_whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_that_the_vocabulary_lacks_follows_on_the_whole(kind: str) -> None:
    growing, whole = opened(kind, eos_token="<new>")
    assert growing.eos_token_id == whole.eos_token_id == len(whole) - 1
    assert growing.encode("Hello<new>") == whole.encode("Hello<new>")
    assert growing.decode([5, len(whole) - 1]) == whole.decode([5, len(whole) - 1])


ASKED: dict[str, Callable[[Any], Any]] = {
    "size": len,
    "tokens": lambda words: words.convert_ids_to_tokens([5, 300]),
    "ids": lambda words: words.convert_tokens_to_ids(["a", "<s>"]),
    "backend": lambda words: json.loads(words.backend_tokenizer.to_str())["model"],
    "long": lambda words: words.encode("a long text " * 400),
    "many": lambda words: [words.encode(text) for text in TEXTS],
    "batch": lambda words: words(TEXTS, add_special_tokens=False)["input_ids"],
    "pair": lambda words: words("one", "two")["input_ids"],
    "letters": lambda words: words.encode("<s>x", split_special_tokens=True),
    "copy": lambda words: copy.deepcopy(words).encode("Hello"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_all_else_finds_the_whole_vocabulary(asked: str) -> None:
    growing, whole = opened("bytes")
    growing.encode("Hello world")
    assert ASKED[asked](growing) == ASKED[asked](whole)
    assert growing.is_whole
    assert growing.encode(TEXTS[3]) == whole.encode(TEXTS[3])
    assert growing.decode([7, 300]) == whole.decode([7, 300])


@pytest.mark.parametrize(
    "change",
    [
        {"type": "Unigram"},
        {"dropout": 0.1},
        {"end_of_word_suffix": "</w>"},
        {"unk_token": "none"},
    ],
)
def test_other_kinds_do_not_grow(change: dict[str, Any]) -> None:
    _, stored = made("bytes")
    with pytest.raises(ValueError, match="cannot grow"):
        grown({**stored, "model": stored["model"] | change})


def test_a_very_long_token_does_not_grow() -> None:
    _, stored = made("pieces")
    stored = json.loads(json.dumps(stored))
    stored["model"]["vocab"]["x" * 301] = len(stored["model"]["vocab"])
    with pytest.raises(ValueError, match="cannot grow"):
        grown(stored)


def test_added_tokens_that_a_text_does_not_spell_cost_it_no_merges() -> None:
    tokens = [*BYTES, "a", "b", "ab", "<", ">", "<>", "<><>"]
    ids = {token: index for index, token in enumerate(tokens)}
    asked = []

    class Asked(ImpliedMerges):
        def rank(self, index: int, left: str, right: str) -> tuple[float, ...] | None:
            asked.append(left + right)
            return super().rank(index, left, right)

    words = Tokenizer(models.BPE(ids, [], byte_fallback=True))
    words.add_special_tokens(["<", ">", "<>", "<><>"])
    growing = GrowingVocabulary(json.loads(words.to_str()), ids, Asked(ids, None))
    growing.grow(["ab"])
    assert asked == ["ab"]
    assert growing.backend.encode("ab<><>").ids == [ids["ab"], ids["<><>"]]


def test_an_added_token_that_the_vocabulary_lacks_does_not_grow() -> None:
    _, stored = made("bytes")
    beyond = {**stored["added_tokens"][0], "id": len(stored["model"]["vocab"])}
    with pytest.raises(ValueError, match="cannot grow"):
        grown({**stored, "added_tokens": [beyond]})
