"""Tiny checkpoints in row-packed formats, and the plain checkpoint that computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoints import VOCAB, architecture, save_checkpoint
from quantize_rows import RECIPES, fp8_blocks
from quantized_checkpoints import is_linear
from safetensors.torch import load_file, save_file
from specexec_kernels.formats import METHODS
from specexec_kernels.formats.base import PackedWeight, Stored, described
from torch import Tensor

# tiles of 128 would be larger than the matrices
SMALL = RECIPES | {
    name: replace(
        RECIPES[name],
        settings={**RECIPES[name].settings, "weight_block_size": [32, 32]},
        pack=partial(fp8_blocks, size=32, dtype=dtype),
    )
    for name, dtype in (("fp8", torch.float8_e4m3fn), ("fp8-e5m2", torch.float8_e5m2))
}


def unpacked(
    tensors: dict[str, Tensor], shape: tuple[int, ...], settings: Any, name: str = "linear"
) -> Tensor:
    """The weight (outputs, inputs) float32 that the tensors of a linear mean."""
    stored = Stored(name, shape[0], shape[1], described(tensors), tensors.__getitem__)
    fmt = METHODS[settings["quant_method"]].read(stored, settings)
    assert fmt is not None
    return PackedWeight(fmt, shape[1], shape[0], tensors).unpack()


def save_row_packed(
    folder: Path, recipe: str, name: str = "llama", **options: Any
) -> tuple[Path, Path]:
    """Write `folder`/plain and `folder`/packed, which compute the same; as save_quantized."""
    return save_packed_by(folder, SMALL[recipe].pack, SMALL[recipe].settings, name, **options)


def save_packed_by(
    folder: Path,
    pack: Callable[[Tensor], dict[str, Tensor]],
    settings: Mapping[str, Any],
    name: str = "llama",
    vocab_size: int = VOCAB,
    std: float = 0.3,
) -> tuple[Path, Path]:
    """As save_row_packed, with what packs a weight and the quantization_config given."""
    plain, packed = folder / "plain", folder / "packed"
    config = architecture(name)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 96, 16
    config.vocab_size = vocab_size
    save_checkpoint(plain, config, std=std)
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        linear = key.removesuffix(".weight")
        if not (is_linear(key) and key.endswith(".weight")):
            stored[key] = tensor
            continue
        leaves = pack(tensor.float())
        tensors[key] = unpacked(leaves, tuple(tensor.shape), settings, linear)
        stored |= {f"{linear}.{leaf}": value for leaf, value in leaves.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    packed.mkdir()
    content = json.loads((plain / "config.json").read_text())
    content["quantization_config"] = dict(settings)
    (packed / "config.json").write_text(json.dumps(content))
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    return plain, packed
