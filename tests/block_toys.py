"""Small DFlash and JetSpec heads as their makers publish them, and what their code computes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

ROWS, MASK = 5, 63  # of a block; the token at its open places
FEATURES = (2, 4, 5)  # what a head reads of a target of eight layers: rows in front of these


@dataclass
class BlockToy:
    """A head's weights, by their names in its files, as modules of transformers' Qwen3."""

    config: transformers.Qwen3Config
    layers: torch.nn.ModuleList
    norm: Qwen3RMSNorm
    hidden_norm: Qwen3RMSNorm
    fc: torch.nn.Linear
    causal: bool

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By their names in the file."""
        parts = {name: getattr(self, name) for name in ("layers", "norm", "hidden_norm", "fc")}
        return {
            f"{part}.{name}": tensor.clone()
            for part, module in parts.items()
            for name, tensor in module.state_dict().items()
        }

    def save(
        self,
        folder: Path,
        layout: str = "dflash_config",
        absent: Sequence[str] = (),
        more: dict[str, Tensor] | None = None,
        **settings: Any,
    ) -> Path:
        """Writes the head as a folder.

        Args:
            layout: "dflash_config", as both authors have it, or "speculators".
            absent: tensors that are left out.
            more: tensors that are added.
            settings: of config.json, beside the usual ones, or of `dflash_config`.
        """
        own = self.config.to_dict()
        inside = {"mask_token_id": MASK, "target_layer_ids": [each - 1 for each in FEATURES]}
        inside |= {"causal_head": True} if self.causal else {}
        inside |= {key: settings.pop(key) for key in tuple(settings) if key in _INSIDE}
        if layout == "dflash_config":
            said: dict[str, Any] = {
                **own, "architectures": ["DFlashDraftModel"], "block_size": ROWS,
                "num_target_layers": 8, "dflash_config": inside,
            }  # fmt: skip
        else:
            said = {
                "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
                "transformer_layer_config": own, "block_size": ROWS, "mask_token_id": MASK,
                "aux_hidden_state_layer_ids": list(FEATURES),
            }  # fmt: skip
        stored = {name: each for name, each in self.tensors.items() if name not in absent}
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**said, **settings}))
        save_file(stored | (more or {}), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    @torch.no_grad()
    def run(self, root: int, features: Tensor, table: Tensor) -> Tensor:
        """(ROWS - 1, hidden) what the head makes of the places behind a root.

        As `DFlashDraftModel` and `Qwen3DFlashAttention` of both authors' code compute it: queries
        of the block alone, keys and values of the target's rows and of the block.

        Args:
            features: (tokens, 3 * the target's width) the target's rows of all tokens before.
            table: (vocabulary, hidden) embeddings.
        """
        context = self.hidden_norm(self.fc(features))
        rows = table[torch.tensor([root, *[MASK] * (ROWS - 1)])]
        places = torch.arange(len(context) + ROWS)
        cos, sin = Qwen3RotaryEmbedding(self.config)(rows[None], places[None])
        sees = torch.ones(ROWS, len(places)).bool()
        if self.causal:
            sees = sees.tril(len(context))
        for layer in self.layers:
            normed = layer.input_layernorm(rows)
            rows = rows + self._attended(layer.self_attn, normed, context, (cos, sin), sees)
            rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
        return self.norm(rows)[1:]

    def _attended(
        self, part: Any, block: Tensor, context: Tensor, angles: tuple[Tensor, Tensor], sees: Tensor
    ) -> Tensor:
        dim, both = part.head_dim, torch.cat([context, block])
        q = part.q_norm(part.q_proj(block).view(len(block), -1, dim)).transpose(0, 1)[None]
        k = part.k_norm(part.k_proj(both).view(len(both), -1, dim)).transpose(0, 1)[None]
        v = part.v_proj(both).view(len(both), -1, dim).transpose(0, 1)[None]
        at = len(context)
        q = apply_rotary_pos_emb(q, q, *(each[:, at:] for each in angles))[0]
        k = apply_rotary_pos_emb(k, k, *angles)[1]
        k, v = (each.repeat_interleave(part.num_key_value_groups, 1) for each in (k, v))
        scores = (q @ k.transpose(2, 3) * dim**-0.5).masked_fill(~sees, -torch.inf)
        mixed = (scores.softmax(-1) @ v)[0].transpose(0, 1).reshape(len(block), -1)
        return part.o_proj(mixed)  # type: ignore[no-any-return]


_INSIDE = ("mask_token_id", "target_layer_ids", "causal_head", "causal")


def block_toy(causal: bool = False, hidden: int = 32, layers: int = 2, **settings: Any) -> BlockToy:
    """A head with random weights."""
    torch.manual_seed(9)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=hidden, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope_theta=10000.0,
        max_position_embeddings=2048, **settings,
    )  # fmt: skip
    config._attn_implementation = "eager"
    toy = BlockToy(
        config,
        torch.nn.ModuleList(Qwen3DecoderLayer(config, index) for index in range(layers)),
        Qwen3RMSNorm(hidden),
        Qwen3RMSNorm(hidden),
        torch.nn.Linear(len(FEATURES) * hidden, hidden, bias=False),
        causal,
    )
    with torch.no_grad():
        for part in (toy.layers, toy.norm, toy.hidden_norm, toy.fc):
            for weights in part.state_dict().values():
                weights.normal_(std=0.3)
    return toy
