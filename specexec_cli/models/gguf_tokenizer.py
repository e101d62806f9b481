"""The tokenizer and chat template in a GGUF file's metadata, built once and then kept as files.

transformers knows how to build tokenizers of such vocabularies; for a large one that takes seconds,
for Gemma's half a minute. What was built is kept in the cache folder under the vocabulary's own
hash, so that files of one model in several sizes share it.
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
        CheckpointError: there is none, or one of a kind that is not known.
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
        with suppress(Exception):  # damaged since: it is built anew
            return AutoTokenizer.from_pretrained(
                kept, local_files_only=True, trust_remote_code=False
            )
    tokenizer = build_gguf_tokenizer(path, metadata)
    with suppress(OSError):  # a cache
        _keep(tokenizer, kept)
    return tokenizer


def _kept_at(metadata: Mapping[str, Any]) -> Path:
    """Where the tokenizer of a vocabulary is kept: what it is built from is in the name."""
    content = json.dumps([transformers.__version__, _VERSION, dict(metadata)], sort_keys=True)
    name = hashlib.sha256(content.encode()).hexdigest()[:32]
    return user_cache_path("specexec", appauthor=False) / "tokenizers" / name


_VERSION = 2  # of what is made of a vocabulary here


def _keep(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        partial.rename(folder)
    except OSError:  # no room, or another session was faster
        shutil.rmtree(partial, ignore_errors=True)
        raise


def build_gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer that a file's metadata describe.

    Args:
        path: of the file, for messages.
        metadata: of the keys `tokenizer.*`, without that word, and `general.architecture`.
    Raises:
        CheckpointError: it is of a kind that is not known, or makes no sense.
    """
    # here, since it brings many models' tokenizers with it
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
    if byte_level:  # a vocabulary of bytes alone has none
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
    except Exception as error:  # whatever a value of the metadata makes the libraries do
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: its tokenizer cannot be read: {reason}") from error


def _splitting(patterns: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    """Pieces of bytes: each pattern cuts what the one before it left."""
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _without_invented(backend: Tokenizer, count: int) -> Tokenizer:
    """The tokenizer without tokens that the file does not have.

    transformers builds it as its class of tokenizers for a family, which adds the special tokens
    that it takes for granted (GPT-2's <|endoftext|>) where the vocabulary has none; no model has
    rows for them.

    Args:
        count: of the file's tokens.
    """
    stored = parse_json(backend.to_str())
    stored["added_tokens"] = [each for each in stored["added_tokens"] if each["id"] < count]
    return Tokenizer.from_str(json.dumps(stored))
