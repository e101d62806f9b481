"""Row-packed checkpoints through the engine: every format, and damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import chain_logits, open_float32
from row_checkpoints import save_row_packed
from specexec_kernels.row_quantize import RECIPES
from test_quantized import TOKENS

from specexec_cli.models.quantized import RowLinear

Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_are_those_of_the_unpacked_weights(recipe: str, tmp_path: Path) -> None:
    plain, packed = save_row_packed(tmp_path, recipe)
    notices: list[str] = []
    found, expected = open_float32(packed, "ssd", notice=notices.append), open_float32(plain, None)
    try:
        linear = found.skeleton.layers[1].layer.get_submodule("self_attn.q_proj")
        assert isinstance(linear, RowLinear)
        ours, theirs = chain_logits(found, TOKENS), chain_logits(expected, TOKENS)
        assert theirs.std() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
    finally:
        found.close()
        expected.close()
    assert len(notices) == (recipe == "fp8")
