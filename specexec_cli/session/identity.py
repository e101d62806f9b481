"""What texts follow from besides prompt, sampling and limits, as one word to compare."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from specexec_kernels import dispatch
from transformers import PreTrainedTokenizerBase

from specexec_cli.loading import Prepared


def text_identity(found: Prepared) -> str:
    """One word for the target, its tokenizer and the arithmetic: the same word, the same texts.

    Where weights wait, how many texts run at once and what drafts are no part of it: no token
    depends on them.
    """
    target = found.target
    told = hashlib.sha256()
    parts: list[Any] = [
        [_file(path) for path in target.files],
        [(each.name, each.dtype, each.shape, each.start) for each in target.values()],
        target.config, sorted(found.eos_ids), _tokenizer(found.tokenizer),
        str(found.dtype), dispatch.rounding(found.device),
    ]  # fmt: skip
    for part in parts:
        told.update(json.dumps(part, sort_keys=True, default=str).encode())
    return told.hexdigest()


def _file(path: Path) -> list[Any]:
    """What tells a file of weights from others, without reading it.

    In the caches of the hub and of Ollama it is a link to a file that is named by its content.
    """
    real = path.resolve()
    if real.parent.name == "blobs":
        return [path.name, real.name]
    status = real.stat()
    return [path.name, status.st_size, status.st_mtime_ns]


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)  # none has one that is all Python
    words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    return [
        type(tokenizer).__name__, words, tokenizer.special_tokens_map,
        getattr(tokenizer, "chat_template", None),
        getattr(tokenizer, "clean_up_tokenization_spaces", None),
    ]  # fmt: skip
