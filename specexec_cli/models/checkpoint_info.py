"""Small facts kept beside the weights: which tokens end a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from specexec_cli.errors import CheckpointError


def eos_token_ids(
    folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Every token that ends a text: generation_config.json's, else config.json's, the tokenizer's.

    Raises:
        CheckpointError: generation_config.json is broken.
    """
    path = folder / "generation_config.json"
    stored: Any = None
    if path.is_file():
        try:
            stored = json.loads(path.read_text("utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    for value in (stored, config.eos_token_id, tokenizer.eos_token_id):
        if isinstance(value, int):
            return frozenset([value])
        if value:
            return frozenset(int(item) for item in value)
    return frozenset()
