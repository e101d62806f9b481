"""Hashes of everything that a session's texts, and the rows of its caches, depend on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from specexec_kernels import dispatch
from transformers import PreTrainedTokenizerBase

from specexec_cli.kept import file_name
from specexec_cli.loading import Prepared
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.prefixes.arithmetic import arithmetic_of

# Files beside config.json in which some tools say how weights are packed.
_PACKED_CONFIGS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_DIGEST = re.compile(r"(sha256-)?[0-9a-f]{40,64}")
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of a file of weights


def text_identity(found: Prepared) -> str:
    """A hash of the target, its tokenizer and its arithmetic: equal hashes mean equal texts.

    Offload tiers, the number of texts at once and the drafter are not included, because no token
    depends on them.
    """
    return _digest([
        *_weights(found.target), sorted(found.eos_ids), _tokenizer(found.tokenizer),
        str(found.dtype), found.target_spec.eight_bit_rows, dispatch.rounding(found.device),
        *(["8-bit keys and values"] if found.target_spec.eight_bit_kv else []),
    ])  # fmt: skip


def kept_as(
    found: Prepared, *, of_draft: bool = False, device: torch.device | None = None
) -> tuple[str, str]:
    """The name of the folder that keeps rows of a model, and all that their bits depend on.

    Args:
        of_draft, device: see `rows_identity`.
    """
    entry = found.pair.draft if of_draft else found.pair.target
    assert entry is not None, "there is a draft model"
    identity = rows_identity(found, of_draft=of_draft, device=device)
    return f"{file_name(entry.weights)}-{found.settings['dtype']}-{identity[:12]}", identity


def rows_identity(
    found: Prepared, *, of_draft: bool = False, device: torch.device | None = None
) -> str:
    """A hash of all that the bits of a text's rows in the target's caches depend on, but tokens.

    Besides the weights that is the code that computes with them, and on a GPU whether experts come
    one by one, since a CPU may then compute some of them. For a trained head there are more rows.
    Of several machines it is which layers each has, and the arithmetic of all.

    Args:
        of_draft: the rows of the draft model, which there is; a copy of the target may have parts
            of it.
        device: that computes them; None for the session's.
    """
    device = device or found.device
    weights, spec = _weights(found.target), found.target_spec
    if of_draft:
        assert found.draft is not None
        weights = [_weights(found.draft), weights if found.draft_shares else None]
        spec = found.draft_spec
    one_by_one = device.type != "cpu" and bool(found.target_spec.expert_bytes)
    away = found.hosts.arithmetic if found.hosts is not None and not of_draft else []
    return _digest([
        *weights, str(found.dtype), spec.eight_bit_rows, spec.eight_bit_kv,
        arithmetic_of(device), one_by_one, found.decision.work.features, away,
    ])  # fmt: skip


def _digest(parts: Sequence[Any]) -> str:
    told = hashlib.sha256()
    for part in parts:
        told.update(json.dumps(part, sort_keys=True, default=str).encode())
    return told.hexdigest()


def _weights(target: Checkpoint) -> list[Any]:
    """What identifies the target's weights and config."""
    return [
        [_file(path) for path in target.files],
        [(each.name, each.dtype, each.shape, each.start) for each in target.values()],
        target.config,
        [path.read_text("utf-8", errors="replace")
         for path in (target.folder / name for name in _PACKED_CONFIGS) if path.is_file()],
    ]  # fmt: skip


def _file(path: Path) -> list[Any]:
    """Identifies a file of weights without reading it.

    In the caches of the hub and of Ollama, weights are links to files that are named by a hash of
    their content. Other files are identified by size, time of change and some of their bytes.
    """
    real = path.resolve()
    if real.parent.name == "blobs" and _DIGEST.fullmatch(real.name):
        return [path.name, real.name]
    status = real.stat()
    sampled = hashlib.sha256()
    with real.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(number * status.st_size // _SAMPLES)
            sampled.update(file.read(_SAMPLE_BYTES))
    return [path.name, status.st_size, status.st_mtime_ns, sampled.hexdigest()]


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)  # pure Python tokenizers have none
    words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    return [
        type(tokenizer).__name__, words, tokenizer.special_tokens_map,
        getattr(tokenizer, "chat_template", None),
        getattr(tokenizer, "clean_up_tokenization_spaces", None),
    ]  # fmt: skip
