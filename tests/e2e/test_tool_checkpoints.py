"""Whole checkpoints as quantizers wrote them, read bit for bit and computed as transformers does.

scripts/make_checkpoint_fixtures.py wrote them, by the tools that their references name.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from checkpoints import chain_logits, open_float32
from safetensors import safe_open
from test_quantized import linear
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "data" / "formats"
CHECKPOINTS = sorted(path.parent.name for path in FOLDER.glob("*/reference.safetensors"))


def sha256(weight: Tensor) -> str:
    """Of the bytes of a weight, row by row; zeros have no sign."""
    return hashlib.sha256((weight + 0).contiguous().view(torch.uint8).numpy()).hexdigest()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_are_those_that_the_tool_unpacks(name: str) -> None:
    with safe_open(FOLDER / name / "reference.safetensors", "pt") as file:
        meaning = {key: value for key, value in file.metadata().items() if key != "tool"}
    assert meaning
    model = open_float32(FOLDER / name, None)
    try:
        for key, value in meaning.items():
            dtype, digest = value.split()
            found = linear(model, key).packed_weight().unpack()
            assert found.std() > 0.01
            assert sha256(found.to(getattr(torch, dtype))) == digest, key
    finally:
        model.close()


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("tier", ["ssd", None])
def test_logits_are_those_of_the_unpacked_weights(name: str, tier: str | None) -> None:
    """transformers' own, in float32."""
    with safe_open(FOLDER / name / "reference.safetensors", "pt") as file:
        tokens, expected = file.get_tensor("tokens").tolist(), file.get_tensor("logits")
    model = open_float32(FOLDER / name, tier)
    try:
        found = chain_logits(model, tokens)
    finally:
        model.close()
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
