"""A large vocabulary of a GGUF file is read in parts: the tokens are those of the whole one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gguf
import pytest
from gguf import TokenType
from gguf_files import write_small_vocabulary
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from specexec_cli.errors import CheckpointError
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


def cut(kept: Path) -> None:
    kept.write_bytes(kept.read_bytes()[:1000])


@pytest.mark.parametrize("harm", [cut, Path.unlink])
def test_a_kept_tokenizer_that_cannot_be_read_is_built_again(
    harm: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = write_small_vocabulary(tmp_path / "m.gguf", "gpt2", TokenType.CONTROL)
    expected = load_gguf_tokenizer(path).encode(LONG)
    (kept,) = tmp_path.rglob("*.json")
    raw = kept.read_bytes()
    assert load_gguf_tokenizer(path).encode(LONG) == expected, "as it was kept"
    harm(kept)
    assert load_gguf_tokenizer(path).encode(LONG) == expected
    assert kept.read_bytes() == raw, "it was kept again"


def test_what_is_wrong_beside_a_kept_tokenizer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = write_small_vocabulary(tmp_path / "m.gguf", "gpt2", TokenType.CONTROL)
    load_gguf_tokenizer(path)
    (kept,) = tmp_path.rglob("*.json")
    kept.write_text(kept.read_text().replace("</s>", "</t>"))
    with pytest.raises(CheckpointError, match=r"its eos_token_id is \d+, but that token is found"):
        load_gguf_tokenizer(path)


WIDE = str.maketrans("|", "\uff5c")
# the added tokens of DeepSeek-V3's and R1's tokenizer.json, in which some are not special
ADDED = {
    name.translate(WIDE): special
    for name, special in {
        "<|begin▁of▁sentence|>": True, "<|end▁of▁sentence|>": True, "<|▁pad▁|>": True,
        "<|User|>": False, "<|tool▁calls▁begin|>": False, "<think>": False, "   ": False,
    }.items()
}  # fmt: skip
TOLD = [
    text.translate(WIDE)
    for text in (
        "<|User|>ab  ab<|end▁of▁sentence|>",
        "<think>\nab   12 漢字 1234<|User|",
        "é  x  y!",
    )
]
DEEPSEEK = {
    "deepseek-v3": (
        r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "deepseek-r1-qwen": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}  # fmt: skip


def makers(split: str) -> Tokenizer:
    """A small one in the form of DeepSeek's tokenizer.json: added tokens beside the vocabulary."""
    tokens = [*sorted(ByteLevel.alphabet()), "ab", "\u0120\u0120", "\u0120\u0120\u0120"]
    cuts: list[Any] = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in DEEPSEEK[split]
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                "use_regex": False}  # fmt: skip
    kept_alone = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    merges = ["a b", "\u0120 \u0120", "\u0120\u0120 \u0120"]
    stored = {
        "version": "1.0", "truncation": None, "padding": None, "post_processor": None,
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, to_bytes]},
        "decoder": {**to_bytes, "add_prefix_space": True, "use_regex": True},
        "added_tokens": [
            {"id": len(tokens) + n, "content": content, "special": special, **kept_alone}
            for n, (content, special) in enumerate(ADDED.items())
        ],
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)}, "merges": merges,
        },
    }  # fmt: skip
    return Tokenizer.from_str(json.dumps(stored))


@pytest.mark.parametrize("split", DEEPSEEK)
@pytest.mark.parametrize("parts", [False, True])
def test_added_tokens_of_any_letters_are_those_of_the_makers_tokenizer(
    split: str, parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek's have wide bars, which bytes are not spelled with."""
    original = makers(split)
    count = original.get_vocab_size()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "deepseek2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([original.id_to_token(n) for n in range(count)])
    looks = ["\uff5c" in content for content in ADDED]  # as llama.cpp's converter has it
    kinds = [TokenType.CONTROL if control else TokenType.USER_DEFINED for control in looks]
    writer.add_token_types([TokenType.NORMAL] * (count - len(ADDED)) + kinds)
    writer.add_token_merges(["a b", "\u0120 \u0120", "\u0120\u0120 \u0120"])
    begin, end, pad = (original.token_to_id(content) for content in list(ADDED)[:3])
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(pad)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):  # as it was kept, too
        found: Any = load_gguf_tokenizer(tmp_path / "m.gguf")
        if parts:
            found = in_parts(tmp_path / "m.gguf", tmp_path, monkeypatch)
            assert isinstance(found, GrowingTokenizer)
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (begin, end, pad)
        for text in (*TOLD, "".join(ADDED)):
            ids = original.encode(text).ids
            assert found.encode(text) == [begin, *ids]
            assert found.decode(ids) == original.decode(ids, skip_special_tokens=False)
        every = range(count)
        assert found.decode(every) == original.decode(every, skip_special_tokens=False)
        if parts:
            assert not found.is_whole
        assert len(found) == count
        assert found.get_vocab() == original.get_vocab()


FAMILIES = ["llama", "gemma3", "gemma3n", "gemma4", "phi3", "qwen2"]
NAMED = ["<unk>", "<s>", "</s>", "<bos>", "<eos>", "<pad>", "<mask>", "<|endoftext|>"]


@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma4"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("named", [NAMED, NAMED[:5], NAMED[5:], []], ids=len)
def test_added_tokens_and_settings_are_those_of_the_whole(
    model: str, family: str, named: list[str]
) -> None:
    """Tokens that transformers' classes add among them, which a file has as plain ones or not."""
    plain = [f"<0x{n:02X}>" for n in range(256)]
    plain += [*"abc▁é", "ab", "abc", "  " if family.startswith("gemma") else "\u2581\u2581"]
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
