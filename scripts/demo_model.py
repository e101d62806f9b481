"""A small Llama for training on a CPU, its weights named as in Hugging Face checkpoints.

Follows Touvron et al. 2023 (RMSNorm, SwiGLU, rotary positions in the half-split layout) with
grouped-query heads (Ainslie et al. 2023) and tied embeddings.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of one model; ``head_dim`` is always 32."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int = 4096
    head_dim: int = 32

    def hf_config(self, bos: int, eos: list[int]) -> dict[str, Any]:
        """Return the Hugging Face config.json of this shape."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False,
            "vocab_size": self.vocab, "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "hidden_act": "silu", "max_position_embeddings": 4096,
            "initializer_range": 0.02, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "rope_scaling": None, "attention_bias": False,
            "tie_word_embeddings": True, "use_cache": True, "bos_token_id": bos,
            "eos_token_id": eos, "torch_dtype": "bfloat16",
        }  # fmt: skip

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def rope_tables(length: int, dim: int = 32) -> tuple[Tensor, Tensor]:
    """Return cos and sin tables, each [length, dim], for theta 10000."""
    freq = 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)
    angle = torch.outer(torch.arange(length).float(), freq).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, heads, time, dim] by tables [time, dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        """Map x [batch, time, hidden] to the same shape; ``cache`` extends keys and values."""
        b, t, _ = x.shape
        s = self.s
        q = rotate(self.q_proj(x).view(b, t, s.heads, s.head_dim).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(b, t, s.kv_heads, s.head_dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(b, t, s.kv_heads, s.head_dim).transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(k, v)
        group = s.heads // s.kv_heads
        if t == 1:  # one new token: the query heads of a group attend as rows of one matrix
            rows = q.reshape(b, s.kv_heads, group, s.head_dim)
            out = F.scaled_dot_product_attention(rows, k, v).reshape(b, s.heads, 1, s.head_dim)
        else:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.down_proj = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.mlp = MLP(s)
        self.input_layernorm = RMSNorm(s.hidden)
        self.post_attention_layernorm = RMSNorm(s.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Cache:
    """Keys and values of one layer, [batch, kv_heads, room, head_dim], filled from the left."""

    def __init__(self, batch: int, s: Shape, room: int) -> None:
        self.k = torch.zeros(batch, s.kv_heads, room, s.head_dim)
        self.v = torch.zeros(batch, s.kv_heads, room, s.head_dim)
        self.used = 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.used + k.shape[2]
        self.k[:, :, self.used : end], self.v[:, :, self.used : end] = k, v
        self.used = end
        return self.k[:, :, :end], self.v[:, :, :end]


class Llama(nn.Module):
    def __init__(self, s: Shape, seed: int = 0) -> None:
        super().__init__()
        self.s = s
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.model.layers = nn.ModuleList([Block(s) for _ in range(s.layers)])
        self.model.norm = RMSNorm(s.hidden)
        cos, sin = rope_tables(4096, s.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init(seed)

    def _init(self, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * self.s.layers) ** 0.5 if small else 0.02
                nn.init.normal_(p, std=std, generator=gen)

    def forward(self, ids: Tensor, caches: list[Cache] | None = None, start: int = 0) -> Tensor:
        """Map ids [batch, time] to logits [batch, time, vocab]."""
        return self.logits(self.layer_rows(ids, caches, start)[-1])

    def logits(self, x: Tensor) -> Tensor:
        """Map rows [batch, time, hidden] behind the last layer to logits [batch, time, vocab]."""
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)  # type: ignore

    def layer_rows(
        self, ids: Tensor, caches: list[Cache] | None = None, start: int = 0
    ) -> list[Tensor]:
        """Map ids [batch, time] to what each layer reads and the last one writes, in this order,
        each [batch, time, hidden].
        """
        rows = [self.model.embed_tokens(ids)]  # type: ignore[operator]
        cos = self.cos[start : start + ids.shape[1]]  # type: ignore[index]
        sin = self.sin[start : start + ids.shape[1]]  # type: ignore[index]
        for i, block in enumerate(self.model.layers):  # type: ignore[arg-type]
            rows.append(block(rows[-1], cos, sin, None if caches is None else caches[i]))
        return rows
