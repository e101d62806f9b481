"""Builds a tokenizer and chat template from a GGUF file's metadata, and keeps them as files.

transformers can build a tokenizer from such a vocabulary, but for a large one that takes seconds.
The tokenizer is kept in the cache folder under a hash of the metadata that it is built from, so
that a model's files of several quantizations share it.
"""

from __future__ import annotations

import gc
import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import transformers
from platformdirs import user_cache_path
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.container import read_gguf, shown
from specexec_cli.gguf.pre_tokenizers import BEGINS, PATTERNS, WHOLE_PIECES
from specexec_cli.guarded import parse_json
from specexec_cli.kept import replacing, write_sealed
from specexec_cli.models.growing_vocabulary import (
    PARTS,
    GrowingTokenizer,
    GrowingVocabulary,
    parts_of,
)

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
    metadata = _metadata(path)
    kept = _kept_at(metadata)
    if kept.is_file():
        with suppress(Exception):  # a kept file is damaged: the tokenizer is built again
            return _kept_tokenizer(path, metadata, kept)
    return build_gguf_tokenizer(path, metadata, kept)


def _metadata(path: Path) -> dict[str, Any]:
    """What build_gguf_tokenizer takes: a GGUF file's vocabulary, and what it says of it."""
    metadata = {
        key.removeprefix("tokenizer."): value
        for key, value in read_gguf(path).metadata.items()
        if key.startswith("tokenizer.") or key == "general.architecture"
    }
    if not isinstance(metadata.get("ggml.tokens"), list):
        raise CheckpointError(
            f"{path} has no vocabulary: name a folder that has a tokenizer with `tokenizer`"
        )
    return metadata


def _kept_tokenizer(path: Path, metadata: Mapping[str, Any], kept: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that was kept; a large one begins with what its first text needs."""
    parts = kept.with_suffix(PARTS)
    if not parts.is_file():
        return _wrapped(metadata, tokenizer_file=str(kept))
    vocabulary = GrowingVocabulary(parts, metadata["ggml.tokens"], lambda: _whole(path, kept))
    return _wrapped(metadata, vocabulary=vocabulary)


def _whole(path: Path, kept: Path) -> Tokenizer:
    """The whole tokenizer that was kept, or where that is damaged or gone, one built again."""
    with suppress(Exception):
        return Tokenizer.from_file(str(kept))
    with suppress(OSError):  # it was damaged: the next session keeps it again
        kept.unlink(missing_ok=True)
    built: PreTrainedTokenizerFast = build_gguf_tokenizer(path, _metadata(path))
    return built.backend_tokenizer


def _kept_at(metadata: Mapping[str, Any]) -> Path:
    """The file for a tokenizer, named by a hash of everything that it is built from."""
    digest = hashlib.sha256(repr((transformers.__version__, _VERSION)).encode())
    for key, value in sorted(metadata.items()):
        content = _content(value)
        digest.update(f"{key} {type(value)} {len(content)} ".encode() + content)
    name = digest.hexdigest()[:32]
    return user_cache_path("specexec", appauthor=False) / "tokenizers" / f"{name}.json"


def _content(value: Any) -> bytes:
    """A value of the metadata as bytes; a vocabulary's lists take JSON or repr() far longer."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        return "\0".join(value).encode() + array("q", map(len, value)).tobytes()
    if type(first) in (int, float):
        with suppress(OverflowError):  # numbers that no vocabulary has
            return array("q" if type(first) is int else "d", value).tobytes()
    return repr(value).encode()


_LARGE = 50_000  # tokens; fewer are read in a tenth of a second
_VERSION = 5  # to be raised when this module builds other tokenizers from the same metadata


def _keep(backend: Tokenizer, file: Path, tokens: Sequence[str]) -> None:
    """Writes a tokenizer's files whole, whatever another process does.

    Args:
        tokens: of the file that it was built from.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    stored = backend.to_str()
    if len(tokens) >= _LARGE and (parts := parts_of(parse_json(stored), tokens)) is not None:
        write_sealed(file.with_suffix(PARTS), parts)
    with replacing(file) as partial:
        partial.write_text(stored, "utf-8")


def build_gguf_tokenizer(
    path: Path, metadata: Mapping[str, Any], kept: Path | None = None
) -> PreTrainedTokenizerBase:
    """Builds the tokenizer that a GGUF file's metadata describe.

    Args:
        path: the file, for messages.
        metadata: the values of `general.architecture` and of all keys `tokenizer.*`, those without
            the prefix `tokenizer.`.
        kept: where to keep it.
    Raises:
        CheckpointError: the tokenizer is of an unknown kind, or cannot be built.
    """
    collects = gc.isenabled()
    gc.disable()  # collections would look at a million strings, a sixth of the time
    try:
        backend = _backend(path, metadata)
        if kept is not None:
            with suppress(OSError):  # works without the cache, too
                _keep(backend, kept, metadata["ggml.tokens"])
                # read again, since transformers takes longer to copy a large one
                return _kept_tokenizer(path, metadata, kept)
        return _wrapped(metadata, tokenizer_object=backend)
    except CheckpointError:
        raise
    except Exception as error:  # a bad value can make the libraries raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: its tokenizer cannot be read: {reason}") from error
    finally:
        if collects:
            gc.enable()


def _backend(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer itself, in which special tokens have no meaning yet."""
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
    architecture = str(metadata.get("general.architecture"))
    described = {
        names.get(key, key.removeprefix("ggml.")): value for key, value in metadata.items()
    }
    if byte_level:  # a vocabulary of single bytes has no merges
        described.setdefault("merges", [])
    elif kind == "llama" and "merges" not in described:
        merges = implied_merges(tokens, described.get("scores"), architecture.startswith("gemma"))
        if merges is not None:
            described["merges"] = merges
    backend, _ = convert_gguf_tokenizer(architecture, described)
    if backend.get_vocab_size() > len(tokens):
        backend = _without_invented(backend, len(tokens))
    if byte_level:
        backend.pre_tokenizer = _splitting(PATTERNS[split])
        backend.model.ignore_merges = split in WHOLE_PIECES
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        _spell_spaces(backend, prefix=metadata.get("ggml.add_space_prefix") is not False)
    return backend


def _spell_spaces(backend: Tokenizer, prefix: bool) -> None:
    """Spells spaces as SentencePiece and llama.cpp do: a piece of text begins with one more.

    transformers leaves that one out where a text begins with a space or follows a special token,
    and always puts it there, whatever the file says.

    Args:
        prefix: whether the file wants it.
    """
    replaced = normalizers.Replace(" ", "\u2581")
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replaced])
        backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer, backend.decoder = replaced, decoders.Sequence(back)
    backend.pre_tokenizer = None


def _wrapped(metadata: Mapping[str, Any], **backend: Any) -> PreTrainedTokenizerBase:
    """transformers' tokenizer with the special tokens and the chat template of a GGUF file.

    Args:
        backend: the tokenizer, as `tokenizer_object`, its file, as `tokenizer_file`, or a
            GrowingVocabulary, as `vocabulary`.
    """
    tokens = metadata["ggml.tokens"]
    special = {
        name: tokens[metadata[f"ggml.{key}"]]
        for name, key in _SPECIAL.items()
        if f"ggml.{key}" in metadata
    }
    byte_level = metadata.get("ggml.model") == "gpt2"
    begins = not byte_level or (metadata.get("ggml.pre") or "default") in BEGINS
    kind: Any = GrowingTokenizer if "vocabulary" in backend else PreTrainedTokenizerFast
    found: PreTrainedTokenizerBase = kind(
        **backend,
        add_bos_token=bool(metadata.get("ggml.add_bos_token", begins)),
        chat_template=metadata.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: special.get(name) for name in _SPECIAL},
    )
    return found


def implied_merges(
    tokens: Sequence[str], scores: Sequence[float] | None, by_place: bool
) -> list[str] | None:
    """The merges that a SentencePiece vocabulary implies, best first, as transformers finds them.

    transformers' own search takes ten times as long for Gemma's 262,144 tokens.

    Args:
        by_place: a token's place is its rank, as with Gemma, whose runs of spaces are spelled with
            `\u2581`; else its score is.
    Returns:
        None where a merge has a space of its own, which a line of merges cannot say.
    """
    if by_place:
        tokens = ["\u2581" * len(t) if " " in t and not t.strip() else t for t in tokens]
        ranks = {token: -float(place) for place, token in enumerate(tokens)}
    else:
        ranks = dict(zip(tokens, scores or (), strict=False))
    known = set(tokens)
    found = [
        (rank, cut, len(token) - cut, f"{token[:cut]} {token[cut:]}")
        for token, rank in ranks.items()
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]
    found.sort(key=itemgetter(0, 1, 2), reverse=True)
    lines = [line for _, _, _, line in found]
    return lines if all(line.count(" ") == 1 for line in lines) else None


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
