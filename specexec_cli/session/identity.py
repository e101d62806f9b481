"""A hash of everything, besides prompt, sampling and limits, that a session's texts depend on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from specexec_kernels import dispatch
from transformers import PreTrainedTokenizerBase

from specexec_cli.loading import Prepared


def text_identity(found: Prepared) -> str:
    """A hash of the target, its tokenizer and its arithmetic: equal hashes mean equal texts.

    Offload tiers, the number of texts at once and the drafter are not included, because no token
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
    """Identifies a file of weights without reading it.

    In the caches of the hub and of Ollama, weights are links to files that are named by a hash of
    their content. Other files are identified by size and time of change.
    """
    real = path.resolve()
    if real.parent.name == "blobs":
        return [path.name, real.name]
    status = real.stat()
    return [path.name, status.st_size, status.st_mtime_ns]


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)  # pure Python tokenizers have none
    words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    return [
        type(tokenizer).__name__, words, tokenizer.special_tokens_map,
        getattr(tokenizer, "chat_template", None),
        getattr(tokenizer, "clean_up_tokenization_spaces", None),
    ]  # fmt: skip
