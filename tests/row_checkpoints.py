"""Tiny checkpoints in row-packed formats, and the plain checkpoint that computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import architecture, edit_json, save_checkpoint
from quantized_checkpoints import is_linear
from safetensors.torch import load_file, save_file
from specexec_kernels.formats import METHODS
from specexec_kernels.formats.base import RowWeight, Stored
from specexec_kernels.row_quantize import RECIPES
from torch import Tensor

NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32",
    torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def unpacked(
    tensors: dict[str, Tensor], shape: tuple[int, ...], settings: Any, name: str = "linear"
) -> Tensor:
    """The weight (outputs, inputs) float32 that the tensors of a linear mean."""
    found = {leaf: (NAMES[tensor.dtype], tuple(tensor.shape)) for leaf, tensor in tensors.items()}
    stored = Stored(name, shape[0], shape[1], found, tensors.__getitem__)
    fmt = METHODS[settings["quant_method"]].read(stored, settings)
    assert fmt is not None
    return RowWeight(fmt, shape[1], shape[0], tensors).unpack()


def save_row_packed(folder: Path, recipe: str, name: str = "llama") -> tuple[Path, Path]:
    """Write `folder`/plain and `folder`/packed, which compute the same; as save_quantized."""
    plain, packed = folder / "plain", folder / "packed"
    config = architecture(name)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 96, 16
    save_checkpoint(plain, config)
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        linear = key.removesuffix(".weight")
        if not (is_linear(key) and key.endswith(".weight")):
            stored[key] = tensor
            continue
        leaves = RECIPES[recipe].pack(tensor.float())
        tensors[key] = unpacked(leaves, tuple(tensor.shape), RECIPES[recipe].settings, linear)
        stored |= {f"{linear}.{leaf}": value for leaf, value in leaves.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    packed.mkdir()
    (packed / "config.json").write_bytes((plain / "config.json").read_bytes())
    edit_json(packed / "config.json", quantization_config=dict(RECIPES[recipe].settings))
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    return plain, packed
