"""Loads a checkpoint's tokenizer, and checks that two tokenizers agree."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase

from specexec_cli.errors import CheckpointError, TokenizerMismatchError
from specexec_cli.models.gguf_tokenizer import load_gguf_tokenizer
from specexec_cli.models.tiktoken_model import FILE, load_tiktoken

_PROBE = "def f(x):\n    return x  # naïve ✓ 12,345"
_FILES = ("tokenizer.json", FILE, "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder or of a GGUF file.

    A folder with only tokenizer.model (SentencePiece) will do.

    Raises:
        CheckpointError: the tokenizer is missing or cannot be read.
    """
    if folder.is_file():
        return load_gguf_tokenizer(folder)
    if not any((folder / name).is_file() for name in _FILES):
        raise CheckpointError(
            f"{folder} has no tokenizer (tokenizer.json or tokenizer.model): "
            "copy the original model's, or name a folder that has one with `tokenizer`"
        )
    # only tokenizer.model: AutoTokenizer would leave out the leading space and the <s>
    alone = not any((folder / name).is_file() for name in _FILES if name != "tokenizer.model")
    ranks_alone = (folder / FILE).is_file() and not (folder / "tokenizer.json").is_file()
    try:
        if ranks_alone:
            found = load_tiktoken(folder)
        elif alone:
            found = LlamaTokenizer.from_pretrained(
                folder, local_files_only=True, add_bos_token=True
            )
        else:
            found = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        if not all(type(index) is int for index in found.get_vocab().values()):
            raise ValueError("not every token has a whole number")
        found.encode(_PROBE)
        return found
    except Exception as error:  # the tokenizer libraries raise bare Exceptions
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{folder}: the tokenizer cannot be read: {reason}") from error


def check_same_tokenizer(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, draft_vocab_size: int
) -> None:
    """Checks that a token id means the same text to the target and to the draft model.

    A draft tree passes token ids from one model to the other, so every id that both have must be
    the same token. Ids that only one of them has (padding, extra special tokens) do no harm as
    long as the draft model's embedding covers the target's tokens.

    Args:
        draft_vocab_size: rows of the draft model's embedding.
    Raises:
        TokenizerMismatchError: the tokenizers differ; the message says where.
    """
    ours = {index: token for token, index in target.get_vocab().items()}
    theirs = {index: token for token, index in draft.get_vocab().items()}
    differing = sorted(i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i])
    if differing:
        first = differing[0]
        raise TokenizerMismatchError(
            f"target and draft model do not share a tokenizer: {len(differing)} of "
            f"{len(ours)} token ids differ, the first is id {first}: {ours[first]!r} for the "
            f"target, {theirs[first]!r} for the draft. Choose a draft of the same model family"
        )
    if max(ours, default=-1) >= draft_vocab_size:
        raise TokenizerMismatchError(
            f"the target's tokenizer has ids up to {max(ours)}, the draft model knows only "
            f"{draft_vocab_size} tokens. Choose a draft of the same model family"
        )
    if target.encode(_PROBE) != draft.encode(_PROBE):
        raise TokenizerMismatchError(
            "target and draft model share a vocabulary but split text differently (merges, "
            "normalisation or the beginning-of-text token). Choose a draft of the same model family"
        )
