"""Small EAGLE-3 heads as their makers publish them, and what the paper says that they compute."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

_HEADS, _KV_HEADS, _EPS, _THETA = 4, 2, 1e-5, 10000.0
FEATURES = (2, 4, 5)  # of a target of eight layers, where a config names none


def save_target(folder: Path, hidden: int = 32, layers: int = 8) -> PreTrainedModel:
    """Writes a Llama with random weights; returns transformers' own."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    target = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weights in target.state_dict().values():
            weights.normal_(std=0.3)
    target.save_pretrained(folder)
    return target.eval()


@dataclass(frozen=True)
class EagleToy:
    """A head's weights, by their names in EAGLE's own files, and what its config says."""

    tensors: dict[str, Tensor]
    hidden: int
    norm_first: bool = False

    def save(
        self, folder: Path, layout: str = "midlayer", absent: Sequence[str] = (), **settings: Any
    ) -> Path:
        """Writes the head as a folder.

        Args:
            layout: "midlayer", as EAGLE's authors and SpecForge have it, or "speculators".
            absent: tensors that are left out.
            settings: of config.json, beside the usual ones.
        """
        rows = self.tensors["lm_head.weight"].shape[0]
        layer = {
            "model_type": "llama", "vocab_size": 64, "hidden_size": self.hidden,
            "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS, "rms_norm_eps": _EPS, "rope_theta": _THETA,
            "max_position_embeddings": 2048, "hidden_act": "silu",
        }  # fmt: skip
        stored = {name: each for name, each in self.tensors.items() if name not in absent}
        if layout == "midlayer":
            said: dict[str, Any] = {**layer, "architectures": ["LlamaForCausalLMEagle3"]}
        else:
            stored = {name.replace("midlayer.", "layers.0."): each for name, each in stored.items()}
            said = {
                "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
                "transformer_layer_config": layer,
            }  # fmt: skip
        if self.norm_first:
            said["norm_before_residual"] = True
        folder.mkdir(parents=True)
        said |= {"draft_vocab_size": rows, **settings}
        (folder / "config.json").write_text(json.dumps(said))
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def fused(self, features: Tensor) -> Tensor:
        """The target's rows side by side, (rows, 3 * its width), as one row each."""
        return features @ self.tensors["fc.weight"].T

    def run(self, tokens: Sequence[int], rows: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """What the head makes of a text, as EAGLE's published code computes it.

        Args:
            tokens: (rows,) each stands behind the token that its row is of.
            rows: (rows, hidden) fused rows of the target, and the head's own behind them.
            table: (vocabulary, hidden) embeddings.
        Returns:
            (rows, 64) logits of the target's tokens, and (rows, hidden) rows to go on from.
        """
        part = {name.removeprefix("midlayer."): each for name, each in self.tensors.items()}
        embedded = _norm(table[torch.tensor(list(tokens))], part["input_layernorm.weight"])
        normed = _norm(rows, part["hidden_norm.weight"])
        residual = normed if self.norm_first else rows
        both = torch.cat([embedded, normed], dim=-1)
        residual = residual + _attended(both, part)
        inner = _norm(residual, part["post_attention_layernorm.weight"])
        gate = F.silu(inner @ part["mlp.gate_proj.weight"].T)
        inner = gate * (inner @ part["mlp.up_proj.weight"].T)
        made = residual + inner @ part["mlp.down_proj.weight"].T
        own = _norm(made, part["norm.weight"]) @ part["lm_head.weight"].T
        logits = torch.full((len(own), 64), -torch.inf)
        logits[:, torch.arange(own.shape[1]) + part["d2t"]] = own
        return logits, made


def eagle_toy(
    hidden: int = 32, of_target: int = 32, vocab: int = 40, norm_first: bool = False
) -> EagleToy:
    """A head with random weights.

    Args:
        of_target: numbers in a row of the target.
        vocab: tokens of the head's own vocabulary, of the target's 64.
    """
    torch.manual_seed(7)
    head_dim = hidden // _HEADS
    shapes = {
        "embed_tokens.weight": (64, hidden), "fc.weight": (hidden, 3 * of_target),
        "midlayer.self_attn.q_proj.weight": (_HEADS * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (_KV_HEADS * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (_KV_HEADS * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, _HEADS * head_dim),
        "midlayer.mlp.gate_proj.weight": (48, hidden), "midlayer.mlp.up_proj.weight": (48, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, 48), "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,), "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }  # fmt: skip
    tensors = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    kept = torch.randperm(64)[:vocab].sort().values
    tensors["d2t"] = kept - torch.arange(vocab)
    tensors["t2d"] = torch.isin(torch.arange(64), kept)
    return EagleToy(tensors, hidden, norm_first)


def _norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + _EPS).sqrt() * weight


def _attended(both: Tensor, part: Mapping[str, Tensor]) -> Tensor:
    """Causal attention with rotary positions from 0, in the half-split layout."""
    count = len(both)
    q, k, v = (both @ part[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    dim = q.shape[1] // _HEADS
    q, k, v = (each.view(count, -1, dim).transpose(0, 1) for each in (q, k, v))
    angles = torch.outer(torch.arange(count), _THETA ** (-torch.arange(0, dim, 2) / dim))
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = (_turned(each, turn) for each in (q, k))
    k, v = (each.repeat_interleave(_HEADS // _KV_HEADS, 0) for each in (k, v))
    hidden = torch.ones(count, count).triu(1).bool()
    scores = (q @ k.transpose(1, 2) / math.sqrt(dim)).masked_fill(hidden, -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
    return mixed @ part["self_attn.o_proj.weight"].T


def _turned(rows: Tensor, turn: Tensor) -> Tensor:
    first, second = rows.chunk(2, -1)
    turned = torch.complex(first, second) * turn
    return torch.cat([turned.real, turned.imag], -1)


@torch.no_grad()
def target_features(
    target: PreTrainedModel, tokens: Sequence[int], features: Sequence[int] = FEATURES
) -> Tensor:
    """(tokens, 3 * hidden): what some layers of transformers' own model read, side by side.

    `output_hidden_states` has the last row behind the norm; no feature here is that one.
    """
    found = target(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    return torch.cat([found[number][0] for number in features], dim=-1)
