"""Kimi's tokenizers, whose files are a tiktoken.model and code that is not run."""

from __future__ import annotations

import json
import shutil
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from checkpoints import byte_llama, edit_json, save_checkpoint

from specexec_cli.errors import CheckpointError
from specexec_cli.models.quantize import plan_quantization, write_quantized
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.store import read_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import make_rig

_WORDS = (
    "th", "he", "in", "the", " t", " the", "ing", "er", "an", "am", "el", "ll", "'ll", "it'll",
    "it", "aa", "aaa", "aba", "ab", "ba", "Ca", "amel", "10", "100", "漢", "字", "漢字", "é",
    "\n\n", "  ",
)  # fmt: skip
_CODE = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All bytes and the beginnings of some words, behind which special tokens begin at 295."""
    tokens = [bytes([each]) for each in range(256)]
    for word in _WORDS:
        raw = word.encode()
        starts = (raw[:length] for length in range(2, len(raw) + 1))
        tokens += [start for start in starts if start not in tokens]
    lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (tmp_path / "tiktoken.model").write_text("".join(lines))
    added: dict[str, Any] = {
        "295": {"content": "[BOS]", "special": True}, "296": {"content": "[EOS]", "special": True},
        "297": {"content": "<|im_end|>", "special": True},
        "308": {"content": "<|tool_call_begin|>", "special": False},
    }  # fmt: skip
    config = {"auto_map": _CODE, "bos_token": "[BOS]", "eos_token": "[EOS]",
              "tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<|im_end|>")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # what tiktoken 0.14's Encoding gives for these ranks, Kimi's pattern and special tokens
        ("The other thing, it'll Camel aaaaaababa",
         [84, 257, 32, 111, 259, 114, 261, 263, 44, 32, 274, 32, 67, 282, 32, 275, 275, 275, 98,
          278]),
        ("漢字かthe漢 éa 12345 10000\n\n  x\r\n   ",
         [291, 227, 129, 139, 259, 286, 32, 292, 97, 32, 49, 50, 51, 52, 53, 32, 284, 48, 48, 293,
          32, 32, 120, 13, 10, 294, 32]),
        ("[BOS]the<|im_end|><|tool_call_begin|><|reserved_token_315|>",
         [295, 259, 297, 308, 315]),
    ],
)  # fmt: skip
def test_a_text_has_the_tokens_that_tiktoken_gives_it(
    folder: Path, text: str, expected: list[int]
) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


def test_special_tokens_and_the_chat_template_are_those_of_the_folder(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer) == 295 + 256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (295, 296)
    assert 297 in tokenizer.all_special_ids
    assert 308 not in tokenizer.all_special_ids
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert chat == "the<|im_end|>"


def test_beside_a_tokenizer_json_it_is_not_read(folder: Path) -> None:
    whole: Any = load_tokenizer(folder)
    whole.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tiktoken.model").write_text("damaged")
    edit_json(folder / "tokenizer_config.json", auto_map=None, tokenizer_class=None)
    assert load_tokenizer(folder).encode("the<|im_end|>") == [259, 297]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("IQ==\n", "cannot be read"),
        ("IQ= 0\n", "cannot be read"),
        ("IQ== 1\n", "the ranks in tiktoken.model are not 0, 1, 2"),
        ("IQ== 0\nIg== 0\n", "the ranks in tiktoken.model are not 0, 1, 2"),
    ],
)
def test_a_damaged_file_is_one_line(folder: Path, lines: str, told: str) -> None:
    (folder / "tiktoken.model").write_text(lines)
    with pytest.raises(CheckpointError, match=told) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_file_that_is_cut_at_a_line_end_is_refused(folder: Path, cut: int) -> None:
    path = folder / "tiktoken.model"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-cut]))
    with pytest.raises(CheckpointError, match=f"has {295 - cut} tokens, and tokenizer_config.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("index", "content", "told"),
    [
        ("298", "the", "gives 'the' the id 298, but it is 259"),
        ("299", "[EOS]", "'\\[EOS\\]' the id 299, but it is 296"),
        ("296", "<|reserved_token_400|>", "the id 400, but it is 296"),
        ("3", "[X]", "names 3 to 308 behind them"),
        ("551", "[X]", "names 295 to 551 behind them"),
        ("x", "[X]", "cannot be read"),
    ],
)
def test_ids_that_the_tokens_do_not_get_are_refused(
    folder: Path, index: str, content: str, told: str
) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = config["added_tokens_decoder"] | {index: {"content": content, "special": False}}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=added)
    with pytest.raises(CheckpointError, match=told) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


def test_a_role_without_a_named_token_is_refused(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", pad_token="[PAD]")
    with pytest.raises(CheckpointError, match=r"a special token of .* is not in"):
        load_tokenizer(folder)


@pytest.mark.parametrize("tool", ["quantize", "rig"])
def test_a_copy_of_a_model_has_it_too(folder: Path, tmp_path: Path, tool: str) -> None:
    save_checkpoint(folder, byte_llama(num_hidden_layers=1, vocab_size=295 + 256))
    copied = tmp_path / "copy"
    if tool == "quantize":
        write_quantized(plan_quantization(read_checkpoint(folder), 4, 16), copied)
    else:
        copied.mkdir()
        for pattern in make_rig.COPIED:
            for path in folder.glob(pattern):
                shutil.copy(path, copied)
    text = "[BOS]the other<|im_end|>"
    assert load_tokenizer(copied).encode(text) == load_tokenizer(folder).encode(text)


def test_another_makers_code_is_not_guessed(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["other.Other", None]})
    with pytest.raises(CheckpointError, match="is in code beside it, which is not run"):
        load_tokenizer(folder)
