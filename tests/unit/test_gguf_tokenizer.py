"""A large vocabulary of a GGUF file is read in parts: the tokens are those of the whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from gguf_files import write_small_vocabulary

from specexec_cli.errors import CheckpointError
from specexec_cli.models.gguf_tokenizer import load_gguf_tokenizer
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
    for _ in range(2):  # as it is built, and as it was kept
        growing = in_parts(path, tmp_path / "cache", monkeypatch)
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
        assert not growing.is_whole
        assert growing.get_vocab() == whole.get_vocab()
        assert growing.encode(LONG) == whole.encode(LONG)
        assert growing.is_whole


def cut(kept: Path) -> None:
    kept.write_bytes(kept.read_bytes()[:1000])


@pytest.mark.parametrize("harm", [cut, Path.unlink])
def test_a_kept_tokenizer_that_cannot_be_read_is_built_again(
    harm: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_small_vocabulary(tmp_path / "m.gguf", "gpt2", TokenType.CONTROL)
    expected = load_gguf_tokenizer(path).encode(LONG)
    growing = in_parts(path, tmp_path, monkeypatch)
    (kept,) = tmp_path.rglob("*.json")
    harm(kept)
    assert growing.encode("hello") == expected[:2]
    assert growing.encode(LONG) == expected
    in_parts(path, tmp_path, monkeypatch)
    assert kept.stat().st_size > 1000, "it was kept again"


def test_without_kept_tokenizer_and_file_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_small_vocabulary(tmp_path / "m.gguf", "gpt2", TokenType.CONTROL)
    growing = in_parts(path, tmp_path, monkeypatch)
    (kept,) = tmp_path.rglob("*.json")
    kept.unlink()
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        growing.encode(LONG)


def test_damaged_parts_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_small_vocabulary(tmp_path / "m.gguf", "gpt2", TokenType.CONTROL)
    expected = load_gguf_tokenizer(path).encode(TEXTS[0])
    in_parts(path, tmp_path, monkeypatch)
    (parts,) = tmp_path.rglob("*.parts")
    raw = parts.read_bytes()
    parts.write_bytes(raw[:-4] + (0x7FFFFFFF).to_bytes(4, "little"))  # a merge of no tokens
    assert in_parts(path, tmp_path, monkeypatch).encode(TEXTS[0]) == expected
    assert parts.read_bytes() == raw
