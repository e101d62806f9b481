"""Builds a tokenizer and chat template from a GGUF file's metadata, and keeps them as files.

transformers can build a tokenizer from such a vocabulary, but for a large one that takes seconds,
for Gemma's half a minute. The tokenizer is kept in the cache folder under a hash of the metadata
that it is built from, so that a model's files of several quantizations share it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from platformdirs import user_cache_path
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.container import read_gguf, shown
from specexec_cli.gguf.pre_tokenizers import BEGINS, PATTERNS, WHOLE_PIECES
from specexec_cli.guarded import parse_json

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that a GGUF file describes.

    Raises:
        CheckpointError: the file has no tokenizer, or one of an unknown kind.
    """
    metadata = {
        key.removeprefix("tokenizer."): value
        for key, value in read_gguf(path).metadata.items()
        if key.startswith("tokenizer.") or key == "general.architecture"
    }
    if not isinstance(metadata.get("ggml.tokens"), list):
        raise CheckpointError(
            f"{path} has no vocabulary: name a folder that has a tokenizer with `tokenizer`"
        )
    kept = _kept_at(metadata)
    if kept.is_dir():
        with suppress(Exception):  # the kept files are damaged: the tokenizer is built again
            return AutoTokenizer.from_pretrained(
                kept, local_files_only=True, trust_remote_code=False
            )
    tokenizer = build_gguf_tokenizer(path, metadata)
    with suppress(OSError):  # works without the cache, too
        _keep(tokenizer, kept)
    return tokenizer


def _kept_at(metadata: Mapping[str, Any]) -> Path:
    """The folder for a tokenizer, named by a hash of everything that it is built from."""
    content = json.dumps([transformers.__version__, _VERSION, dict(metadata)], sort_keys=True)
    name = hashlib.sha256(content.encode()).hexdigest()[:32]
    return user_cache_path("specexec", appauthor=False) / "tokenizers" / name


_VERSION = 2  # to be raised when this module builds other tokenizers from the same metadata


def _keep(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged tokenizer
        partial.rename(folder)
    except OSError:  # the disk is full, or another process was faster
        shutil.rmtree(partial, ignore_errors=True)
        raise


def build_gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Builds the tokenizer that a GGUF file's metadata describe.

    Args:
        path: the file, for messages.
        metadata: the values of `general.architecture` and of all keys `tokenizer.*`, those without
            the prefix `tokenizer.`.
    Raises:
        CheckpointError: the tokenizer is of an unknown kind, or cannot be built.
    """
    # imported here because it imports the tokenizers of many models
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    tokens, kind, split = (metadata.get(f"ggml.{key}") for key in ("tokens", "model", "pre"))
    assert isinstance(tokens, list)
    byte_level = kind == "gpt2"
    split = split or "default"
    if byte_level and split not in PATTERNS:
        raise CheckpointError(
            f"{path}: how its tokenizer {shown(split)} splits text is not known: "
            "name a folder with the original model's tokenizer with `tokenizer`"
        )
    names = {
        "ggml.model": "tokenizer_type",
        "ggml.pre": "pre_tokenizer_type",
        "ggml.add_space_prefix": "add_prefix_space",
    }
    described = {
        names.get(key, key.removeprefix("ggml.")): value for key, value in metadata.items()
    }
    if byte_level:  # a vocabulary of single bytes has no merges
        described.setdefault("merges", [])
    try:
        backend, _ = convert_gguf_tokenizer(str(metadata.get("general.architecture")), described)
        backend = _without_invented(backend, len(tokens))
        if byte_level:
            backend.pre_tokenizer = _splitting(PATTERNS[split])
            backend.model.ignore_merges = split in WHOLE_PIECES
        special = {
            name: tokens[metadata[f"ggml.{key}"]]
            for name, key in _SPECIAL.items()
            if f"ggml.{key}" in metadata
        }
        begins = not byte_level or split in BEGINS
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            add_bos_token=bool(metadata.get("ggml.add_bos_token", begins)),
            chat_template=metadata.get("chat_template"),
            clean_up_tokenization_spaces=False,
            **{name: special.get(name) for name in _SPECIAL},
        )
    except Exception as error:  # a bad value can make the libraries raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: its tokenizer cannot be read: {reason}") from error


def _splitting(patterns: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    """A pre-tokenizer that splits text by each pattern in turn, then maps the pieces to bytes."""
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _without_invented(backend: Tokenizer, count: int) -> Tokenizer:
    """The tokenizer without tokens that the file does not have.

    transformers builds a tokenizer of the model family's class. That class adds its usual special
    tokens (GPT-2's <|endoftext|>) where the vocabulary lacks them, and the model has no embeddings
    for these.

    Args:
        count: number of tokens in the file.
    """
    stored = parse_json(backend.to_str())
    stored["added_tokens"] = [each for each in stored["added_tokens"] if each["id"] < count]
    return Tokenizer.from_str(json.dumps(stored))
