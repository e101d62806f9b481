"""Tiny gpt-oss checkpoints with MXFP4 experts as in OpenAI's own, and their weights unpacked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import architecture, save_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

# of openai/gpt-oss-20b's config.json
SETTINGS: dict[str, Any] = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def gpt_oss_config(**changes: Any) -> PretrainedConfig:
    """A small one whose matrices are whole groups of 32."""
    base = architecture("gpt-oss")
    return type(base)(**{**base.to_dict(), **SIZES, **changes})


def save_mxfp4(
    folder: Path, config: PretrainedConfig | None = None, **options: Any
) -> tuple[Path, Path]:
    """Writes `folder`/plain in float32 and `folder`/packed, which mean the same.

    Args:
        options: of save_checkpoint.
    """
    plain, packed = folder / "plain", folder / "packed"
    save_checkpoint(plain, config or gpt_oss_config(), **options)
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    rng = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=rng, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=rng, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    packed.mkdir()
    content = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**content, "quantization_config": SETTINGS}))
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    return plain, packed
