"""How decoder layers attend where PyTorch's attention is not the best that the device has.

transformers' layers hand queries, keys, values and the mask to a function named in the config. For
devices with a tree-attention kernel ours takes a TreeMask, ancestor bits without any mask over the
prefix, to the kernel, and every other mask to transformers' own function for PyTorch's attention.
For two bytes on a CPU another of ours attends in float64.

The kernel walks over slots in blocks that begin at 0 and at the prefix's end, so a row's sums are
grouped differently in passes of different shape: on such a device tokens may differ between methods
where two candidates are nearly tied, as with any half-precision arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from specexec_kernels import dispatch
from specexec_kernels.tree_attention import pack_ancestors
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specexec_cli.models.pass_rows import PassRows

NAME = "specexec_tree"
_WIDE_NAME = "specexec_wide"
_WIDE_BYTES = 16 * 1024 * 1024  # of keys and values that are held in float64 at a time


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Rows that all see the first `prefix_len` slots, and of the others their ancestors."""

    prefix_len: int
    ancestors: Tensor  # (rows, words) int32, see pack_ancestors


def implementation(device: torch.device, dtype: torch.dtype) -> str:
    """transformers' name for how layers without soft-capping attend."""
    if dispatch.uses_triton(device):
        return NAME
    # PyTorch's own rounds a row's result in another way when the pass has other rows
    return _WIDE_NAME if device.type == "cpu" and dtype != torch.float32 else "sdpa"


def tree_mask(
    rows: PassRows, start: int, stop: int, window: int | None, device: torch.device
) -> TreeMask | None:
    """The mask of rows start..stop; None where a sliding window hides part of the prefix."""
    if window is not None and max(rows.positions[start:stop]) >= window:
        return None
    prefix_len = rows.prefix_len + min(start, rows.pending)
    visible = rows.mask(start, stop, None)[0, 0, :, prefix_len:]
    return TreeMask(prefix_len, pack_ancestors(visible).to(device))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TreeMask | Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (1, heads, rows, head_dim), key and value (1, kv_heads, slots, head_dim) ->
    (1, rows, heads, head_dim)."""
    if isinstance(attention_mask, Tensor) and query.shape[1] > key.shape[1]:
        return _grouped(query, key, value, attention_mask, scaling), None
    if not isinstance(attention_mask, TreeMask):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    attended = dispatch.tree_attention(
        query[0].transpose(0, 1), key[0], value[0],
        attention_mask.ancestors, attention_mask.prefix_len, scaling,
    )  # fmt: skip
    return attended[None], None


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Query heads of a group as more rows of their key/value head.

    With a mask transformers copies the whole cache once for every query head of a group, and the
    cache of a captured step is all of its capacity.
    """
    heads, rows, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    group = heads // kv_heads
    attended = nn.functional.scaled_dot_product_attention(
        query.reshape(1, kv_heads, group * rows, head_dim), key, value,
        attn_mask=mask.repeat(1, 1, group, 1), scale=scaling,
    )  # fmt: skip
    return attended.reshape(1, heads, rows, head_dim).transpose(1, 2)


def _wide_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As _attention, in float64 and rounded once, at its end.

    Passes with other rows group the same sums in other ways. In float64 they differ by so little
    that the rounded results are the same.
    """
    kv_heads, slots, head_dim = key.shape[1:]
    group = query.shape[1] // kv_heads
    together = max(1, _WIDE_BYTES // (2 * slots * head_dim * 8))  # key and value heads
    parts = []
    for first in range(0, kv_heads, together):
        last = min(first + together, kv_heads)
        queries = query[:, group * first : group * last].double()
        keys, values = key[:, first:last].double(), value[:, first:last].double()
        parts.append(_grouped(queries, keys, values, attention_mask, scaling))
    return torch.cat(parts, dim=2).to(query.dtype), None


AttentionInterface.register(NAME, _attention)
AttentionInterface.register(_WIDE_NAME, _wide_attention)
