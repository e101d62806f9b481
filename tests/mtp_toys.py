"""Small models with a layer that predicts further tokens (MTP), stored as their makers store it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import edit_json, save_byte_tokenizer
from gguf_toys import TOYS, Toy, toy_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpLayer

# by how such layers are stored: the type, and what makes it small
QWEN = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
BEHIND = ("glm4_moe", "deepseek_v3")
_OPTIONS = {toy.model_type: toy.options for toy in TOYS.values() if toy.model_type in QWEN}
_JOINT = {
    "enorm.weight": "pre_fc_norm_embedding.weight", "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight", "post_norm.weight": "norm.weight",
}  # fmt: skip


def save_mtp_toy(
    model_type: str, folder: Path, std: float = 0.12, **settings: Any
) -> tuple[PreTrainedModel, MtpLayer]:
    """Writes a target with an MTP layer of random weights; returns transformers' own of both."""
    torch.manual_seed(1)
    config = toy_config(Toy(model_type, {**_OPTIONS.get(model_type, {}), **settings}))
    target = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer = MtpLayer(
        _of_one_layer(config), type(target.model.layers[-1]), type(target.model.norm), 0
    )
    with torch.no_grad():
        for module in (target, layer):
            for parameter in module.parameters():
                parameter.normal_(std=std)
    target.save_pretrained(folder)
    path = folder / "model.safetensors"
    stored = load_file(path)
    if model_type in QWEN:
        stored |= {f"mtp.{name}": tensor for name, tensor in _below_mtp(layer)}
        edit_json(folder / "config.json", mtp_num_hidden_layers=1)
    else:
        prefix = f"model.layers.{config.num_hidden_layers}."
        stored |= {prefix + name: tensor for name, tensor in _behind_last(layer)}
        edit_json(folder / "config.json", num_nextn_predict_layers=1)
    save_file(stored, path, metadata={"format": "pt"})
    return target.eval(), layer.eval()


def _of_one_layer(config: PretrainedConfig) -> PretrainedConfig:
    own = type(config).from_dict(config.to_dict())
    own.num_hidden_layers, own.layer_types = 1, ["full_attention"]
    own._attn_implementation = "sdpa"
    own._experts_implementation = "eager"
    if hasattr(own, "first_k_dense_replace"):
        own.first_k_dense_replace = 0
    return own


def _below_mtp(layer: MtpLayer) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in layer.state_dict().items():
        inside = name.removeprefix("mtp_block.")
        yield _JOINT.get(name) or f"layers.0.{inside}", tensor.clone()


def _behind_last(layer: MtpLayer) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in layer.state_dict().items():
        inside = name.removeprefix("mtp_block.")
        yield "shared_head.norm.weight" if name == "post_norm.weight" else inside, tensor.clone()


@torch.no_grad()
def reference(
    target: PreTrainedModel, layer: MtpLayer, tokens: list[int], hidden: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """What transformers' own layer makes of tokens and the hidden rows before them.

    Args:
        tokens: (rows,).
        hidden: (rows, hidden).
        mask: (rows, rows) bool, True = attend; a row's position is how many others it attends to.
    Returns:
        (rows, vocab) logits and (rows, hidden) rows to go on from.
    """
    positions = mask.sum(1)[None]  # a row's own token stands one behind its hidden row
    embeddings = target.get_input_embeddings()(torch.tensor([tokens]))
    rotary = target.model.rotary_emb(embeddings, positions)
    attend = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[None, None]
    found = layer(embeddings, hidden[None], rotary, attend, positions, None)
    return target.lm_head(found)[0], found[0]


@torch.no_grad()
def hidden_rows(target: PreTrainedModel, tokens: list[int]) -> Tensor:
    """(tokens, hidden): what the target's head reads."""
    found: Tensor = target.model(torch.tensor([tokens])).last_hidden_state[0]
    return found


def with_tokenizer(folder: Path) -> Path:
    save_byte_tokenizer(folder)
    return folder
