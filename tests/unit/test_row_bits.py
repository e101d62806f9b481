"""Sizes of row-packed models from config.json alone, held against what files of them take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantize_columns import PACKERS
from quantize_rows import RECIPES
from row_checkpoints import save_row_packed
from specexec_kernels.formats import METHODS

from specexec_cli.catalog.row_bits import _METHODS, packed_bytes, row_bits
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.sizes import architecture_bytes, checkpoint_bytes


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_take_what_the_config_says(recipe: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(save_row_packed(tmp_path, recipe)[1])
    counted, stored = architecture_bytes(checkpoint.config), checkpoint_bytes(checkpoint)
    # what says how weights are meant is not counted, nor that some scales have four bytes: these
    # matrices are small enough for both to be seen, and a table of 1 KB would be most of it
    assert stored.packed
    for index, (ours, theirs) in enumerate(zip(counted.layers, stored.layers, strict=True)):
        tables = sum(
            tensor.n_bytes for name, tensor in checkpoint.items()
            if f".layers.{index}." in name and name.endswith("quant_map")
        )  # fmt: skip
        assert (theirs - tables) * 0.85 <= ours <= theirs


@pytest.mark.parametrize("recipe", PACKERS)
def test_matrices_of_real_size_take_what_the_config_says(recipe: str) -> None:
    """From config.json alone, to half a percent of the tensors that are streamed."""
    outputs, inputs = 512, 4096
    settings = dict(PACKERS[recipe].settings)
    tensors = PACKERS[recipe].pack(torch.zeros(outputs, inputs))
    method = METHODS.get(settings["quant_method"])
    unread = method.unused if method is not None else ()
    stored = sum(tensor.nbytes for leaf, tensor in tensors.items() if leaf not in unread)
    counted = packed_bytes(settings, inputs, outputs)
    assert counted == pytest.approx(stored, rel=0.02 if "act-order" in recipe else 0.005)


def test_every_method_has_its_bits() -> None:
    assert set(METHODS) <= set(_METHODS)


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 16384),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        (
            {"quant_method": "bitsandbytes", "bnb_4bit_use_double_quant": True},
            4 + (8 + 32 / 256) / 64,
        ),
    ],
)
def test_bits(settings: dict[str, object], bits: float | None) -> None:
    assert row_bits(settings, 4096) == bits
