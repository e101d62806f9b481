"""Loading tokenizers, and saying how two of them disagree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import edit_json, save_byte_tokenizer
from transformers import PreTrainedTokenizerBase

from specexec_cli.errors import CheckpointError, TokenizerMismatchError
from specexec_cli.models.tokenizer import check_same_tokenizer, load_tokenizer


@pytest.fixture
def words(tmp_path: Path) -> PreTrainedTokenizerBase:
    return save_byte_tokenizer(tmp_path / "target")


def changed(folder: Path, change: dict[str, str]) -> PreTrainedTokenizerBase:
    """The byte tokenizer with some tokens of its vocabulary renamed."""
    save_byte_tokenizer(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {change.get(token, token): index for token, index in vocab.items()}
    path.write_text(json.dumps(content))
    return load_tokenizer(folder)


def test_the_same_tokenizer_agrees(words, tmp_path):
    check_same_tokenizer(words, save_byte_tokenizer(tmp_path / "draft"), 260)


def test_swapped_tokens_are_named(words, tmp_path):
    other = changed(tmp_path / "draft", {"a": "b", "b": "a"})
    first = words.convert_tokens_to_ids("a")
    with pytest.raises(TokenizerMismatchError) as error:
        check_same_tokenizer(words, other, 260)
    assert f"2 of 260 token ids differ, the first is id {first}: 'a' for the target" in str(
        error.value
    )
    assert "'b' for the draft" in str(error.value)


def test_a_draft_with_fewer_rows_than_tokens(words, tmp_path):
    with pytest.raises(TokenizerMismatchError, match=r"ids up to 259.*knows only 200 tokens"):
        check_same_tokenizer(words, save_byte_tokenizer(tmp_path / "draft"), 200)


def test_padding_ids_of_one_alone_do_no_harm(words, tmp_path):
    larger = save_byte_tokenizer(tmp_path / "draft")
    larger.add_tokens(["<extra_0>", "<extra_1>"])
    check_same_tokenizer(words, larger, 264)
    check_same_tokenizer(larger, words, 264)


def test_another_way_to_split_text(words, tmp_path):
    """One vocabulary, other merges: ids mean the same but prompts would differ."""
    folder = tmp_path / "draft"
    save_byte_tokenizer(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerMismatchError, match="split text differently"):
        check_same_tokenizer(words, load_tokenizer(folder), 260)


def test_a_folder_without_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer .*`tokenizer`"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("damage", ["{", "[]", '{"model": {"type": "BPE"}}', ""])
def test_a_damaged_tokenizer_is_one_line(tmp_path, damage):
    save_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(CheckpointError, match="tokenizer cannot be read") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_an_unknown_tokenizer_class_does_not_matter_beside_tokenizer_json(tmp_path):
    """Older checkpoints name classes that no longer exist; tokenizer.json says all."""
    save_byte_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="SomeOldTokenizerFast")
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode("héllo")) == "héllo"
