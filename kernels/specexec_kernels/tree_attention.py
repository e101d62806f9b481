"""Attention of draft-tree rows over the cached prefix and their ancestors: the reference.

A row sees the slots of the prefix from its first one on (0 without a sliding window), and slot
prefix_len + j where bit j of its ancestor mask is set. With bits, 256 nodes take 8 KB; a float32
mask would take (prefix + 256) * 256 * 4 bytes. The prefix needs no mask.

Source: tree attention of SpecInfer, arXiv:2305.09781, section 4; soft-capped scores of Gemma 2,
arXiv:2408.00118, section 2; sinks of gpt-oss, arXiv:2508.10925, section 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pack_ancestors(mask: Tensor) -> Tensor:
    """Packs a mask into words.

    Args:
        mask: (rows, slots) bool, True = attend.
    Returns:
        (rows, ceil(slots / 32)) int32, slot j at bit j % 32 of word j // 32.
    """
    rows, slots = mask.shape
    padded = torch.zeros(rows, -(-slots // 32) * 32, dtype=torch.int64, device=mask.device)
    padded[:, :slots] = mask
    weights = 2 ** torch.arange(32, device=mask.device)
    words = (padded.view(rows, -1, 32) * weights).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def unpack_ancestors(words: Tensor, slots: int) -> Tensor:
    """The inverse of `pack_ancestors`: (rows, words) int32 to (rows, slots) bool."""
    bits = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).bool().reshape(words.shape[0], -1)[:, :slots]


def tree_attention_ref(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Tensor,
    prefix_len: int,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    first_seen: Tensor | None = None,
) -> Tensor:
    """Attention over the prefix and each row's ancestors, with a dense mask.

    Args:
        queries: (rows, heads, head_dim); consecutive heads share a key/value head.
        keys: (kv_heads, slots, head_dim), slots > prefix_len.
        values: (kv_heads, slots, value_dim).
        ancestors: (rows, words) int32, see `pack_ancestors`; each row must see at least one slot.
        prefix_len: slots of the prefix, which every row sees from its `first_seen` on.
        scale: multiplies the scores; 1 / sqrt(head_dim) where not given.
        softcap: the scores become softcap * tanh(score / softcap).
        sinks: (heads,) logits that take part in the softmax alone, without a value.
        first_seen: (rows,) int32, the first slot of the prefix that a row sees; 0 where not given.
    Returns:
        (rows, heads, value_dim) in the dtype of `queries`.
    """
    rows, slots, group = queries.shape[0], keys.shape[1], queries.shape[1] // keys.shape[0]
    tree = unpack_ancestors(ancestors, slots - prefix_len)
    first = torch.zeros_like(ancestors[:, 0]) if first_seen is None else first_seen
    prefix = torch.arange(prefix_len, device=keys.device) >= first[:, None]
    mask = torch.cat([prefix, tree], dim=1)
    scores = torch.einsum("rhd,hsd->hrs", queries, keys.repeat_interleave(group, 0))
    scores = scores.float() * (scale or 1 / math.sqrt(queries.shape[2]))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, rows, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., :slots].to(values.dtype)
    return torch.einsum("hrs,hsd->rhd", weights, values.repeat_interleave(group, 0))
