"""A large vocabulary of a GGUF file is read in parts: the tokens are those of the whole one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from gguf import TokenType
from gguf_files import write_small_vocabulary
from tokenizers.pre_tokenizers import ByteLevel

from specexec_cli.models import gguf_tokenizer
from specexec_cli.models.gguf_tokenizer import build_gguf_tokenizer, load_gguf_tokenizer
from specexec_cli.models.growing_vocabulary import GrowingTokenizer

TYPES = [TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL, TokenType.UNUSED, None]
TEXTS = ["hello world", "</s>hello<s>", "<pad> wor<unk>", "hello wrd </s>"]
LONG = "hello world " * 400


def in_parts(path: Path, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """The file's tokenizer as it is read where its vocabulary is large, kept in a folder."""
    with patch.context() as now:
        now.setattr("specexec_cli.models.gguf_tokenizer._LARGE", 1)
        now.setenv("XDG_CACHE_HOME", str(folder))
        return load_gguf_tokenizer(path)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("special", TYPES)
def test_the_tokens_are_those_of_the_whole(
    model: str, special: TokenType | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special tokens among them, of whatever type the file says that they are."""
    path = write_small_vocabulary(tmp_path / "m.gguf", model, special)
    whole: Any = load_gguf_tokenizer(path)
    in_parts(path, tmp_path / "cache", monkeypatch)
    growing = in_parts(path, tmp_path / "cache", monkeypatch)  # as it was kept
    assert isinstance(growing, GrowingTokenizer)
    assert not growing.is_whole
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
        assert getattr(growing, name) == getattr(whole, name), name
    for text in TEXTS:
        ids = whole.encode(text)
        assert growing.encode(text) == ids
        for skip in (False, True):
            assert growing.decode(ids, skip_special_tokens=skip) == whole.decode(
                ids, skip_special_tokens=skip
            )
    assert growing.decode(range(len(whole))) == whole.decode(range(len(whole)))
    assert growing.get_added_vocab() == whole.get_added_vocab()
    assert growing.get_vocab() == whole.get_vocab()
    assert not growing.is_whole
    assert growing.encode(LONG) == whole.encode(LONG)
    assert growing.is_whole


def test_a_damaged_frame_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_small_vocabulary(tmp_path / "m.gguf", "gpt2", TokenType.CONTROL)
    expected = load_gguf_tokenizer(path).encode(TEXTS[1])
    assert in_parts(path, tmp_path, monkeypatch).encode(TEXTS[1]) == expected
    (kept,) = tmp_path.rglob("*.frame")
    raw = kept.read_bytes()
    kept.write_bytes(raw.replace(b'"id": 2', b'"id": 3'))
    assert in_parts(path, tmp_path, monkeypatch).encode(TEXTS[1]) == expected
    assert kept.read_bytes() == raw


FAMILIES = ["llama", "gemma3", "gemma4", "phi3", "qwen2"]
NAMED = ["<unk>", "<s>", "</s>", "<bos>", "<eos>", "<pad>", "<mask>", "<|endoftext|>"]


@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma4"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("named", [NAMED, NAMED[:5], NAMED[5:], []], ids=len)
def test_added_tokens_and_settings_are_those_of_the_whole(
    model: str, family: str, named: list[str]
) -> None:
    """Tokens that transformers' classes add among them, which a file has as plain ones or not."""
    plain = [f"<0x{n:02X}>" for n in range(256)]
    plain += [*"abc▁é", "ab", "abc", "  " if family == "gemma3" else "\u2581\u2581"]
    if model == "gpt2":
        plain = [*sorted(ByteLevel.alphabet()), "ab", "abc", "né\u2603"]
    tokens = [*plain, *named, "<tool>", "<think>"]
    metadata = {
        "general.architecture": family, "ggml.model": model, "ggml.tokens": tokens,
        "ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "ggml.scores": [-float(n) for n in range(len(tokens))],
    }  # fmt: skip
    if model != "llama":
        metadata["ggml.merges"] = ["a b", "ab c"]
    path = Path("model.gguf")
    whole = build_gguf_tokenizer(path, metadata)
    stored = json.loads(cast(Any, whole).backend_tokenizer.to_str())
    ids = gguf_tokenizer._ids(metadata)
    frame = gguf_tokenizer._frame(path, metadata, ids)
    assert ids == stored["model"].pop("vocab")
    merges = gguf_tokenizer._merges(metadata, ids).all()
    assert [list(pair) for pair in merges] == stored["model"].pop("merges")
    assert frame.pop("added_tokens") == stored.pop("added_tokens")
    for each in (frame, stored):  # the wrapping writes the last one
        for key in ("vocab", "merges"):
            each["model"].pop(key, None)
        each.pop("post_processor")
    assert frame == stored
