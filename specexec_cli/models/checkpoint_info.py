"""Reads from a checkpoint's config files which tokens end a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from specexec_cli.errors import CheckpointError
from specexec_cli.models.makers_sampling import FILE, read_generation_config


def eos_token_ids(
    folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Every token that ends a text: from generation_config.json, else config.json or the tokenizer.

    Raises:
        CheckpointError: generation_config.json is not a JSON object, or an eos_token_id is neither
            a token id nor a list of token ids.
    """
    sources: tuple[tuple[Path, Any], ...] = (
        (folder / FILE, read_generation_config(folder).get("eos_token_id")),
        (folder / "config.json", config.eos_token_id),
        (folder / "tokenizer_config.json", tokenizer.eos_token_id),
    )
    for source, value in sources:
        ids = value if isinstance(value, list) else [value]
        if value is None or not ids:
            continue
        if not all(type(item) is int for item in ids):
            raise CheckpointError(
                f"{source}: eos_token_id {value!r} is neither a token id nor a list of them"
            )
        return frozenset(ids)
    return frozenset()
