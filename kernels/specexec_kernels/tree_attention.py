"""Attention of draft-tree rows over the cached prefix and their own ancestors: the reference.

Row r sees every slot below `prefix_len`, and slot prefix_len + j where bit j of its ancestor mask
is set. Bits instead of a float mask: 256 nodes take 8 KB instead of (prefix + 256) * 256 * 4 bytes,
and the prefix needs no mask at all.
Source: tree attention of SpecInfer, arXiv:2305.09781, section 4; online softmax of FlashAttention,
arXiv:2205.14135.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pack_ancestors(mask: Tensor) -> Tensor:
    """Pack a mask into words.

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
    """Inverse of `pack_ancestors`: (rows, slots) bool."""
    bits = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).bool().reshape(words.shape[0], -1)[:, :slots]


def tree_attention_ref(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Tensor,
    prefix_len: int,
    scale: float | None = None,
) -> Tensor:
    """Dense masked attention.

    Args:
        queries: (rows, heads, head_dim); consecutive heads share a key/value head.
        keys, values: (kv_heads, slots, head_dim), slots > prefix_len.
        ancestors: (rows, words) int32, see `pack_ancestors`; a row sees at least one slot.
        prefix_len: slots that every row sees.
        scale: of the scores; 1 / sqrt(head_dim) unless told.
    Returns:
        (rows, heads, head_dim) in the dtype of `queries`.
    """
    slots, group = keys.shape[1], queries.shape[1] // keys.shape[0]
    tree = unpack_ancestors(ancestors, slots - prefix_len)
    mask = torch.cat([tree.new_ones(queries.shape[0], prefix_len), tree], dim=1)
    scores = torch.einsum("rhd,hsd->hrs", queries, keys.repeat_interleave(group, 0))
    scores = scores.float() * (scale or 1 / math.sqrt(queries.shape[2]))
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(values.dtype)
    return torch.einsum("hrs,hsd->rhd", weights, values.repeat_interleave(group, 0))
