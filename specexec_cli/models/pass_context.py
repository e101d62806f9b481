"""What the decoder layers of one pass share: where weights come from, masks, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from specexec_cli.models import attention
from specexec_cli.models.attention import TreeMask
from specexec_cli.models.pass_rows import PassRows, Span
from specexec_cli.models.side_by_side import MaskByText, Piece, SideBySide

# Rows that go through a layer together, unless told: bounds activations and masks of long prompts.
CHUNK_ROWS = 512


class LayerSource(Protocol):
    """Where a decoder layer's weights come from. Layers are asked for in cyclic order."""

    @property
    def bytes_streamed(self) -> int:
        """Bytes that came over the link so far."""

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The layer's tensors by checkpoint name; valid inside the `with`."""

    @property
    def failed(self) -> bool:
        """Whether reading ahead has met an error."""

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
        self.chunk_rows = CHUNK_ROWS
        self.positions: Tensor | None = None  # (1, rows) of the chunk that is in a layer
        self.on_layer: Callable[[int], None] = lambda index: None
        self._config = config
        self._rows: SideBySide | None = None
        # of the present pass, by piece and span
        self._masks: dict[tuple[Piece, Span | None], Tensor | TreeMask] = {}
        self._step_masks: Mapping[Span | None, Tensor] = {}

    def begin(self, rows: SideBySide) -> None:
        """A pass over these rows; masks are made where a layer asks for them."""
        self._rows, self._masks = rows, {}

    def begin_step(self, masks: Mapping[Span | None, Tensor]) -> None:
        """A pass over tensors alone, whose masks are given by span."""
        self._rows, self._step_masks = None, masks

    def chunks(
        self, total: int, span: Span | None, writes_cache: bool
    ) -> Iterator[tuple[int, int, Tensor | TreeMask | MaskByText]]:
        """The pass's rows as a layer is to be given them: first, last, and their mask.

        Args:
            total: rows of the pass.
            span: how far back the layer's rows see.
            writes_cache: whether the layer appends keys; one that does not sees those of a layer
                that has finished all its chunks.
        """
        most = self.chunk_rows
        if self._rows is None:
            for start in range(0, total, most):
                yield start, min(start + most, total), self._step_masks[span]
            return
        start = 0
        for pieces in self._rows.chunks(most):
            self._rows.now = pieces
            masks = [self._mask(piece, span, writes_cache) for piece in pieces]
            stop = start + sum(piece.count for piece in pieces)
            yield start, stop, MaskByText(pieces, masks) if self._rows.by_text else masks[0]
            start = stop

    def _mask(self, piece: Piece, span: Span | None, writes_cache: bool) -> Any:
        """The mask of one text's rows, in the form the attention needs."""
        assert self._rows is not None
        rows = self._rows.parts[piece.text]
        mask = self._masks.get((piece, span))
        if mask is None:
            mask = self._made(rows, piece, span)
            # a long prompt's dense masks together would take more room than its activations
            if isinstance(mask, TreeMask) or piece.count == len(rows.tokens):
                self._masks[piece, span] = mask
        if not writes_cache:
            return _with_slots_to_come(mask, len(rows.tokens) - piece.stop)
        return mask

    def _made(self, rows: PassRows, piece: Piece, span: Span | None) -> Tensor | TreeMask:
        if self._config._attn_implementation == attention.NAME:
            return attention.tree_mask(rows, piece.start, piece.stop, span, self.device)
        return self.dense(rows.mask(piece.start, piece.stop, span))

    def dense(self, mask: Tensor) -> Tensor:
        """A bool mask, True = attend, as this model's attention takes it."""
        mask = mask.to(self.device)
        if self._config._attn_implementation != "eager":
            return mask
        blank = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
        return blank.masked_fill(~mask, torch.finfo(self.dtype).min)


def _with_slots_to_come(mask: Any, count: int) -> Any:
    """The mask for slots that later rows of the pass have filled already: hidden."""
    if isinstance(mask, TreeMask):
        return mask.with_hidden_slots(count)
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return nn.functional.pad(mask, (0, count), value=hidden)
