"""Builds a tokenizer and chat template from a GGUF file's metadata, and keeps them as files.

transformers can build a tokenizer from such a vocabulary, but for a large one that takes seconds:
a large one grows with its texts (growing_vocabulary.py). The tokenizer, or a large one without its
vocabulary, is kept in the cache folder under a hash of the metadata that it is built from, so that
a model's files of several quantizations share it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import transformers
from platformdirs import user_cache_path
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.container import read_gguf, shown
from specexec_cli.gguf.pre_tokenizers import BEGINS, PATTERNS, WHOLE_PIECES
from specexec_cli.guarded import parse_json
from specexec_cli.kept import read_sealed, replacing, write_sealed
from specexec_cli.models.growing_vocabulary import GrowingTokenizer, GrowingVocabulary
from specexec_cli.models.merges import ImpliedMerges, ListedMerges, Merges

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ROLES = tuple(f"ggml.{key}" for key in _SPECIAL.values())


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that a GGUF file describes.

    Raises:
        CheckpointError: the file has no tokenizer, or one of an unknown kind.
    """
    metadata = _metadata(path)
    kept = _kept_at(metadata)
    if (growing := _growing(path, metadata, kept.with_suffix(".frame"))) is not None:
        return growing
    if (backend := _read_kept(kept)) is None:
        return build_gguf_tokenizer(path, metadata, kept)
    with _as_checkpoint_error(path):
        return _wrapped(metadata, tokenizer_object=backend)


def _read_kept(kept: Path) -> Tokenizer | None:
    """A kept tokenizer; None if there is none, or a damaged one, which is built again."""
    if not kept.is_file():
        return None
    try:
        return Tokenizer.from_file(str(kept))
    except Exception:  # the library has no other class of its own
        return None


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


def _growing(path: Path, metadata: Mapping[str, Any], kept: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a large vocabulary, which begins with what its first text needs.

    Args:
        kept: where the tokenizer without its vocabulary is kept.
    Returns:
        None if the vocabulary is small, or of a kind that has to be read whole.
    """
    tokens, kind = metadata["ggml.tokens"], metadata.get("ggml.model")
    if len(tokens) < _LARGE or kind not in ("gpt2", "llama", "gemma4"):
        return None
    with _as_checkpoint_error(path):
        try:
            ids = _ids(metadata)
            vocabulary = GrowingVocabulary(
                _kept_frame(path, metadata, ids, kept), ids, _merges(metadata, ids)
            )
        except ValueError:  # the library reads it whole, or says what is wrong
            return None
        return _wrapped(metadata, vocabulary=vocabulary)


def _by_place(metadata: Mapping[str, Any]) -> bool:
    """Whether a token's place is its rank among merges, as with Gemma, and not its score."""
    return str(metadata.get("general.architecture")).startswith("gemma")


def _merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> Merges:
    """The merges of a vocabulary.

    Raises:
        ValueError: they are not told.
    """
    lines = metadata.get("ggml.merges")
    if lines is not None or metadata.get("ggml.model") == "gpt2":  # bytes alone have none
        return ListedMerges(lines or [], ids)
    scores = metadata.get("ggml.scores")
    if scores is None and not _by_place(metadata):
        raise ValueError("it has no scores, which tell the order of its merges")
    return ImpliedMerges(ids, None if _by_place(metadata) else scores)


def _ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The vocabulary as transformers' classes spell it, from 0 in order.

    Raises:
        ValueError: a token is there twice.
    """
    tokens: list[str] = metadata["ggml.tokens"]
    ids = {token: index for index, token in enumerate(_spelled(metadata, tokens))}
    if len(ids) < len(tokens):
        raise ValueError("a token is there twice")
    return ids


def _spelled(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[str]:
    """The tokens as transformers' classes spell those that a file has otherwise."""
    kind = metadata.get("ggml.model")
    if kind == "gpt2":
        known = re.compile(f"[{re.escape(''.join(ByteLevel.alphabet()))}]*").fullmatch
        byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
        whole = set(_found_whole(metadata))
        whole.update(metadata[key] for key in _ROLES if key in metadata)
        return [
            token
            if index in whole or known(token)
            else "".join(part for part, _ in byte_level.pre_tokenize_str(token))
            for index, token in enumerate(tokens)
        ]
    if kind == "llama" and _by_place(metadata):  # runs of spaces
        return ["\u2581" * len(t) if " " in t and not t.strip() else t for t in tokens]
    return list(tokens)


def _found_whole(metadata: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The tokens that are found in a text before it is split, by id.

    They are spelled as in a text, and not as bytes, as DeepSeek's with its wide bars: llama.cpp's
    converter writes them as they are (get_vocab_base of its TextModel).
    """
    types = metadata.get("ggml.token_type") or []
    return {
        index: AddedToken(token, normalized=False, special=kind == _CONTROL)
        for index, (token, kind) in enumerate(zip(metadata["ggml.tokens"], types, strict=False))
        if kind in (_CONTROL, _USER_DEFINED)
    }


def _kept_frame(
    path: Path, metadata: Mapping[str, Any], ids: Mapping[str, int], kept: Path
) -> dict[str, Any]:
    """What _frame() makes, kept since transformers' classes for it are imported slowly."""
    with suppress(ValueError):  # it is not there or damaged: it is made again
        found: dict[str, Any] = parse_json(read_sealed(kept))
        return found
    made = _frame(path, metadata, ids)
    with suppress(OSError):  # works without the cache, too
        write_sealed(kept, json.dumps(made).encode())
    return made


def _frame(path: Path, metadata: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """The tokenizer without its vocabulary, as its JSON has it: built with added tokens alone.

    Args:
        ids: of the vocabulary as _spelled has it.
    """
    few = set(_found_whole(metadata))
    plain = {key: value for key, value in metadata.items() if key not in _ROLES}
    for _ in range(2):  # again with those that the class adds and the vocabulary has
        chosen = sorted(few)
        some = {
            key: [value[index] for index in chosen if index < len(value)]
            for key in ("ggml.tokens", "ggml.token_type", "ggml.scores")
            if isinstance(value := metadata.get(key), list)
        }
        stored: dict[str, Any] = parse_json(
            _backend(path, {**plain, **some, "ggml.merges": []}).to_str()
        )
        added = stored["added_tokens"] = [
            {**each, "id": ids[each["content"]]}
            for each in stored["added_tokens"]
            if each["content"] in ids
        ]
        if few >= {each["id"] for each in added}:
            break
        few |= {each["id"] for each in added}
    return stored


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
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_VERSION = 7  # to be raised when this module builds other tokenizers from the same metadata


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
    with _as_checkpoint_error(path):
        backend = _without_invented(_backend(path, metadata), len(metadata["ggml.tokens"]))
        if kept is not None:
            with suppress(OSError):  # works without the cache, too
                kept.parent.mkdir(parents=True, exist_ok=True)
                with replacing(kept) as partial:
                    partial.write_text(backend.to_str(), "utf-8")
                # read again, since transformers takes longer to copy a large one
                return _wrapped(metadata, tokenizer_file=str(kept))
        return _wrapped(metadata, tokenizer_object=backend)


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    """Within the block, what the libraries raise because of a bad value becomes one line."""
    collects = gc.isenabled()
    gc.disable()  # collections would look at a million strings, a sixth of the time
    try:
        yield
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
    if metadata.get("ggml.model") == "gpt2":
        return _byte_level(path, metadata)
    # imported here because it imports the tokenizers of many models
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    names = {
        "ggml.model": "tokenizer_type",
        "ggml.add_space_prefix": "add_prefix_space",
    }
    described = {
        names.get(key, key.removeprefix("ggml.")): value for key, value in metadata.items()
    }
    described["tokens"] = _spelled(metadata, metadata["ggml.tokens"])
    if metadata.get("ggml.model") == "llama" and "merges" not in described:
        with suppress(ValueError):  # transformers' own search finds them, too
            merges = _merges(metadata, _ids(metadata)).all()
            if not any(" " in word for pair in merges for word in pair):
                described["merges"] = [" ".join(pair) for pair in merges]
    backend, _ = convert_gguf_tokenizer(str(metadata.get("general.architecture")), described)
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        _spell_spaces(backend, prefix=metadata.get("ggml.add_space_prefix") is not False)
    return backend


def _byte_level(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a vocabulary of bytes.

    Not transformers', which spells special tokens as bytes too, and so does not find them in texts.
    """
    split = metadata.get("ggml.pre") or "default"
    if split not in PATTERNS:
        raise CheckpointError(
            f"{path}: how its tokenizer {shown(split)} splits text is not known: "
            "name a folder with the original model's tokenizer with `tokenizer`"
        )
    spelled = _spelled(metadata, metadata["ggml.tokens"])
    vocabulary = {token: index for index, token in enumerate(spelled)}
    merges = ListedMerges(metadata.get("ggml.merges") or [], vocabulary).all()
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split in WHOLE_PIECES))
    backend.pre_tokenizer = splitting(PATTERNS[split])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(_found_whole(metadata).values()))
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
    for name, key in _SPECIAL.items():
        said, index = metadata.get(f"ggml.{key}"), getattr(found, f"{name}_id")
        if index != said:
            raise ValueError(f"its {key} is {said}, but that token is found as {index}")
    return found


def splitting(patterns: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    """A pre-tokenizer that splits text by each pattern in turn, then maps the pieces to bytes."""
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


def _without_invented(backend: Tokenizer, count: int) -> Tokenizer:
    """The tokenizer without tokens that the file does not have.

    transformers builds a tokenizer of the model family's class. That class adds its usual special
    tokens (GPT-2's <|endoftext|>) where the vocabulary lacks them, and the model has no embeddings
    for these.

    Args:
        count: number of tokens in the file.
    """
    if backend.get_vocab_size() <= count:
        return backend
    stored = parse_json(backend.to_str())
    stored["added_tokens"] = [each for each in stored["added_tokens"] if each["id"] < count]
    return Tokenizer.from_str(json.dumps(stored))
