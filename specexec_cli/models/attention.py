"""The attention functions that decoder layers use, one for each kind of device.

transformers' layers hand queries, keys, values and the mask to a function named in the config. On
GPUs with a tree-attention kernel, our function gives a TreeMask (the slots of each node's path,
without any mask over the prefix) to the kernel, and the dense masks of captured draft steps to
PyTorch. On a CPU our kernel sums in one fixed order. Both kernels support sinks, soft-capped
scores, and values of another size than their keys, and both sum a row's positions in the same order
in every pass, whichever slots they lie in: so a row has the same bits as a node of a tree and once
it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from specexec_kernels import cpu_attention, dispatch, tree_attention
from specexec_kernels.split_rows import SplitRows, in_one_piece
from specexec_kernels.tree_attention import TreeMask
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specexec_cli.models.pass_rows import PassRows, Span
from specexec_cli.models.side_by_side import KeysByText, MaskByText
from specexec_cli.models.token_index import UncutMask
from specexec_cli.planning.memory import PART_SLOTS
from specexec_cli.transfers import sent

NAME = "specexec_tree"
DENSE = "specexec_dense"
CPU = "specexec_cpu"
_SCORE_BYTES = 16 * 1024 * 1024  # most bytes of float32 scores for which _split is used


def implementation(device: torch.device) -> str:
    """The name under which transformers knows the attention function for this device."""
    if dispatch.uses_triton(device):
        return NAME
    return CPU if device.type == "cpu" else DENSE


def tree_mask(
    rows: PassRows, start: int, stop: int, span: Span | None, device: torch.device
) -> TreeMask:
    """The mask of rows start..stop, in one transfer."""
    chain = np.arange(rows.prefix_len + start, rows.prefix_len + min(stop, rows.pending))
    nodes = rows.tree_mask[max(0, start - rows.pending) : max(0, stop - rows.pending)]
    first = 0 if span is None else rows.first_seen(start, stop, span)
    mask = tree_attention.tree_mask(chain, nodes, rows.prefix_len + rows.pending, first)
    return replace(mask, table=sent(mask.table, device))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | SplitRows,
    value: Tensor | SplitRows,
    attention_mask: TreeMask | Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention on devices with a tree-attention kernel.

    query (1, heads, rows, head_dim), key (1, kv_heads, slots, head_dim), value (1, kv_heads, slots,
    value_dim) -> (1, rows, heads, value_dim).
    """
    if isinstance(attention_mask, TreeMask):
        attended = dispatch.tree_attention(
            query[0].transpose(0, 1), _of_text(key), _of_text(value), attention_mask, scaling,
            kwargs.get("softcap") or None, kwargs.get("s_aux"),
        )  # fmt: skip
        return attended[None], None
    assert attention_mask is not None
    key, value = in_one_piece(key), in_one_piece(value)
    if 4 * query.shape[1] * query.shape[2] * key.shape[2] <= _SCORE_BYTES:
        return _split(query, key, value, attention_mask, scaling, kwargs), None
    if _is_plain(key, value, kwargs) and query.shape[1] > key.shape[1]:
        return _grouped(query, key, value, attention_mask, scaling), None
    return _dense_attention(module, query, key, value, attention_mask, scaling, **kwargs)


def _dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As _attention, on devices without a kernel; the mask is bool, True = attend."""
    if _is_plain(key, value, kwargs):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    return _written_out(query, key, value, attention_mask, scaling, kwargs), None


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """PyTorch's attention with the query heads of a group laid out as rows of their key/value head.

    Given a mask, transformers would copy the whole cache once for every query head of a group, and
    a captured step is given the cache's full capacity.
    """
    heads, rows, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    group = heads // kv_heads
    attended = nn.functional.scaled_dot_product_attention(
        query.reshape(1, kv_heads, group * rows, head_dim), key, value,
        attn_mask=mask.repeat(1, 1, group, 1), scale=scaling,
    )  # fmt: skip
    return attended.reshape(1, heads, rows, head_dim).transpose(1, 2)


def _split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Tensor:
    """Attention of few rows over many slots, with the slots divided among many GPU blocks.

    For few rows PyTorch's fused attention runs one block for each key/value head, which walks over
    all slots of a captured step: 8 blocks for a 1B draft model, on GPUs that run over a hundred.
    Here the scores are tiles of a product, and values are summed in parts of PART_SLOTS slots.

    Args:
        kwargs: see _written_out.
    """
    heads, rows, head_dim = query.shape[1:]
    kv_heads, slots = key.shape[1:3]
    together = heads // kv_heads * rows  # rows of all query heads that share a key/value head
    parts = slots // PART_SLOTS if slots % PART_SLOTS == 0 else 1
    scores = _wide_product(query.reshape(kv_heads, together, head_dim), key[0].transpose(1, 2))
    scores = scores * (head_dim**-0.5 if scaling is None else scaling)
    weights = _softmax(scores.view(1, heads, rows, slots), mask, kwargs).to(value.dtype)
    weights = weights.reshape(kv_heads, together, parts, -1).transpose(1, 2)
    values = value[0].reshape(kv_heads * parts, slots // parts, -1)
    sums = _wide_product(weights.flatten(0, 1), values)
    attended = sums.view(kv_heads, parts, together, -1).sum(1).to(query.dtype)
    return attended.view(1, heads, rows, -1).transpose(1, 2)


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right for batches of matrices, as float32 sums that are not rounded."""
    if left.dtype == torch.float32:
        return torch.bmm(left, right)
    return torch.bmm(left, right, out_dtype=torch.float32)


def _cpu_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | SplitRows,
    value: Tensor | SplitRows,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As _attention, on a CPU; a row's bits do not depend on other rows. The mask is bool."""
    attended = cpu_attention.attend(
        query[0], _of_text(key), _of_text(value), attention_mask[0, 0], scaling,
        kwargs.get("softcap") or None, kwargs.get("s_aux"),
    )  # fmt: skip
    return attended[None], None


def _of_text(rows: Tensor | SplitRows) -> Tensor | SplitRows:
    """Keys, or values, without the first dimension, where they are one tensor."""
    return rows if isinstance(rows, SplitRows) else rows[0]


def _is_plain(key: Tensor, value: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether PyTorch's attention computes it: no sinks, no soft-capping, heads of one size."""
    sizes = key.shape[-1] == value.shape[-1]
    return sizes and kwargs.get("s_aux") is None and kwargs.get("softcap") is None


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    kwargs: Mapping[str, Any],
) -> Tensor:
    """Attention operation by operation, where neither a kernel nor PyTorch's function suits.

    Args:
        kwargs: transformers' further arguments. `s_aux` holds (heads,) logits of sinks, which only
            take part in the softmax; `softcap` is the largest absolute value of a score.
    """
    heads, rows, head_dim = query.shape[1:]
    kv_heads, slots = key.shape[1:3]
    grouped = query.reshape(1, kv_heads, heads // kv_heads * rows, head_dim)
    scores = grouped @ key.transpose(2, 3) * (head_dim**-0.5 if scaling is None else scaling)
    weights = _softmax(scores.view(1, heads, rows, slots), mask, kwargs).to(value.dtype)
    attended = weights.reshape(1, kv_heads, -1, slots) @ value
    return attended.view(1, heads, rows, value.shape[3]).transpose(1, 2)


def _softmax(scores: Tensor, mask: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """The softmax over the slots that a row attends to, in float32 or wider.

    Args:
        scores: (1, heads, rows, slots).
        kwargs: see _written_out.
    """
    if (softcap := kwargs.get("softcap")) is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    slots = scores.shape[-1]
    if (sinks := kwargs.get("s_aux")) is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=wide)[..., :slots]


def _by_text(attend: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Lets `attend` take rows of several texts, each of which attends to its own text's keys.

    The result is contiguous, as in transformers' own functions: some modelling code views it in
    another shape.
    """

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor | KeysByText,
        value: Tensor | KeysByText,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if isinstance(attention_mask, UncutMask):
            attention_mask = attention_mask.mask
        if not isinstance(attention_mask, MaskByText):
            attended, _ = attend(module, query, key, value, attention_mask, *args, **kwargs)
            return attended.contiguous(), None
        assert isinstance(key, KeysByText) and isinstance(value, KeysByText)  # noqa: PT018
        parts, first = [], 0
        for piece, mask in zip(attention_mask.pieces, attention_mask.masks, strict=True):
            own = query[:, :, first : first + piece.count]
            keys, values = key.parts[piece.text], value.parts[piece.text]
            parts.append(attend(module, own, keys, values, mask, *args, **kwargs)[0])
            first += piece.count
        return torch.cat(parts, dim=1), None

    return attention


SIDE_BY_SIDE = {NAME: _attention, DENSE: _dense_attention, CPU: _cpu_attention}
for _name, _attend in SIDE_BY_SIDE.items():
    AttentionInterface.register(_name, _by_text(_attend))
