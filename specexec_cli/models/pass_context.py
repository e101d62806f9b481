"""What the decoder layers of one pass share: where weights come from, masks, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specexec_cli.models import attention
from specexec_cli.models.attention import TreeMask
from specexec_cli.models.pass_rows import PassRows, Span


class LayerSource(Protocol):
    """Where a decoder layer's weights come from. Layers are asked for in cyclic order."""

    @property
    def bytes_streamed(self) -> int:
        """Bytes that came over the link so far."""

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The layer's tensors by checkpoint name; valid inside the `with`."""

    def restart(self) -> None:
        """Begin again at layer 0 after an aborted pass."""

    def close(self) -> None:
        """Give threads, files and memory back."""


class PassContext:
    """The present pass of one model, as its layers see it."""

    def __init__(self, config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype  # to compute in
        self.source: LayerSource | None = None  # None: every layer's weights stay
        self.on_layer: Callable[[int], None] = lambda index: None
        self._config = config
        self._rows: PassRows | None = None
        # of the present pass, by first and last row and span
        self._masks: dict[tuple[int, int, Span | None], Tensor | TreeMask] = {}
        self._step_masks: Mapping[Span | None, Tensor] = {}

    def begin(self, rows: PassRows) -> None:
        """A pass over these rows; masks are made where a layer asks for them."""
        self._rows, self._masks = rows, {}

    def begin_step(self, masks: Mapping[Span | None, Tensor]) -> None:
        """A pass over tensors alone, whose masks are given by span."""
        self._rows, self._step_masks = None, masks

    def attention_mask(self, start: int, stop: int, span: Span | None) -> Tensor | TreeMask:
        """The pass's mask for rows start..stop, in the form the attention needs."""
        if self._rows is None:
            return self._step_masks[span]
        key = start, stop, span
        if key in self._masks:
            return self._masks[key]
        mask: Tensor | TreeMask | None = None
        if self._config._attn_implementation == attention.NAME:
            mask = attention.tree_mask(self._rows, start, stop, span, self.device)
        if mask is None:
            mask = self.dense(self._rows.mask(start, stop, span))
        # a long prompt's dense masks together would take more room than its activations
        if isinstance(mask, TreeMask) or stop - start == len(self._rows.tokens):
            self._masks[key] = mask
        return mask

    def dense(self, mask: Tensor) -> Tensor:
        """A bool mask, True = attend, as this model's attention takes it."""
        mask = mask.to(self.device)
        if self._config._attn_implementation != "eager":
            return mask
        blank = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
        return blank.masked_fill(~mask, torch.finfo(self.dtype).min)
