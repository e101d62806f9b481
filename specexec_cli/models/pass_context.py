"""The state that the decoder layers of one pass share: weight source, masks and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from specexec_kernels.cpu_layer import Workspace
from specexec_kernels.tree_attention import TreeMask
from torch import Tensor, nn
from transformers import PretrainedConfig

from specexec_cli.core import Piece
from specexec_cli.models import attention
from specexec_cli.models.pass_rows import PassRows, Span
from specexec_cli.models.side_by_side import MaskByText, SideBySide
from specexec_cli.transfers import sent

# Default for the most rows that go through a layer together. It bounds the memory that activations
# and masks of long prompts take.
CHUNK_ROWS = 512


class LayerSource(Protocol):
    """The source of the decoder layers' weights; layers are asked for in cyclic order."""

    @property
    def bytes_streamed(self) -> int:
        """Bytes that came over the link so far."""

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The layer's tensors by checkpoint name; valid inside the `with`."""

    @property
    def failed(self) -> bool:
        """Whether reading ahead has failed."""

    def restart(self) -> None:
        """Begins again at layer 0 after an aborted pass."""

    def close(self) -> None:
        """Ends threads, closes files and frees memory."""


class PassContext:
    """The present pass of one model, as its layers see it."""

    def __init__(self, config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype  # compute dtype
        self.source: LayerSource | None = None  # None: all layers' weights are resident
        self.first_layer = 0  # index of the layer that `source` calls 0
        self.layers_give_tuples = False  # as in transformers' older modelling code
        self.chunk_rows = CHUNK_ROWS
        self.positions: Tensor | None = None  # (1, rows) of the chunk that is in a layer
        self.on_layer: Callable[[int], None] = lambda index: None
        self.space = Workspace()  # of layers that run as one compiled call
        self._config = config
        self._rows: SideBySide | None = None
        # masks of the present pass, by piece and span
        self._masks: dict[tuple[Piece, Span | None], Tensor | TreeMask] = {}
        self._step_masks: Mapping[Span | None, Tensor | TreeMask] = {}
        self._whole: dict[tuple[Span | None, bool], Any] = {}
        self._angles: dict[int, tuple[Any, Any]] = {}  # as given, and in the compute dtype
        # rows in front of layers that a trained head reads, by the number of the layer
        self._wanted: Sequence[int] = ()
        self._taken: dict[int, Tensor] = {}

    def begin(self, rows: SideBySide) -> None:
        """Begins a pass over these rows; masks are made when a layer asks for them."""
        self._rows, self._masks, self._whole, self._angles = rows, {}, {}, {}

    def begin_step(self, masks: Mapping[Span | None, Tensor | TreeMask]) -> None:
        """Begins a captured step, which is given a mask for each span."""
        self._rows, self._step_masks, self._whole, self._angles = None, masks, {}, {}

    def angles(self, given: Any) -> Any:
        """Rotary angles in the compute dtype, made once for all layers that are given the same.

        transformers computes them in the dtype of `hidden`, which is float32.
        """
        if id(given) not in self._angles:
            self._angles[id(given)] = given, in_dtype(given, self.dtype)
        return self._angles[id(given)][1]

    def take(self, numbers: Sequence[int]) -> None:
        """Has the rows that some layers of the pass read be kept, until `taken` is asked for them.

        Args:
            numbers: of layers, from 1; one behind the last stands for what comes out of that.
        """
        self._wanted, self._taken = numbers, {}

    def offer(self, number: int, hidden: Tensor) -> None:
        """Keeps the (1, rows, hidden) rows that a layer reads, in the compute dtype, if wanted."""
        if number in self._wanted:
            self._taken[number] = hidden.to(self.dtype, copy=True)

    def taken(self) -> list[Tensor]:
        """The rows that were kept in this pass, in the order of `take`; they are given away."""
        found = self.taken_so_far()
        return [found[number] for number in self._wanted]

    def taken_so_far(self) -> dict[int, Tensor]:
        """The rows that were kept up to now, by the number of the layer; they are given away."""
        found, self._taken = self._taken, {}
        return found

    def one_mask(self, total: int, span: Span | None, writes_cache: bool) -> Any:
        """The mask of a pass of one text whose rows run as one chunk, the same object for all
        layers alike; None where there are several texts.

        Args: as for `chunks`.
        """
        if self._rows is not None and len(self._rows.parts) > 1:
            return None
        key = span, writes_cache
        if key not in self._whole:
            [(_, _, self._whole[key])] = self.chunks(total, span, writes_cache)
        return self._whole[key]

    def chunks(
        self, total: int, span: Span | None, writes_cache: bool
    ) -> Iterator[tuple[int, int, Tensor | TreeMask | MaskByText]]:
        """Divides the pass's rows into the chunks that a layer runs.

        Args:
            total: rows of the pass.
            span: how far back the layer's rows attend.
            writes_cache: whether the layer appends keys. If not, it reads the keys of an earlier
                layer, which already hold all rows of the pass.
        Returns:
            (start, stop, mask) for each chunk: rows start..stop and their mask.
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
        """The mask of one text's rows, in the form that the attention function takes."""
        assert self._rows is not None
        rows = self._rows.parts[piece.text]
        mask = self._masks.get((piece, span))
        if mask is None:
            mask = self._made(rows, piece, span)
            # not kept for chunks of a long prompt: all its dense masks would take more memory than
            # its activations
            if isinstance(mask, TreeMask) or piece.count == len(rows.tokens):
                self._masks[piece, span] = mask
        if not writes_cache and rows.others_keys is None:
            return _with_slots_to_come(mask, len(rows.tokens) - piece.stop)
        return mask

    def _made(self, rows: PassRows, piece: Piece, span: Span | None) -> Tensor | TreeMask:
        if self._config._attn_implementation == attention.NAME:
            return attention.tree_mask(rows, piece.start, piece.stop, span, self.device)
        return self.dense(rows.mask(piece.start, piece.stop, span))

    def dense(self, mask: Tensor) -> Tensor:
        """Converts a bool mask, True = attend, to the form that this model's attention takes."""
        mask = sent(mask, self.device)
        if self._config._attn_implementation != "eager":
            return mask
        blank = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
        return blank.masked_fill(~mask, torch.finfo(self.dtype).min)


def _with_slots_to_come(mask: Any, count: int) -> Any:
    """The mask with `count` more hidden slots, which later rows of the pass have already filled."""
    if isinstance(mask, TreeMask):  # names the slots that are seen
        return mask
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return nn.functional.pad(mask, (0, count), value=hidden)


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A tensor, or a tuple of tensors, in a dtype; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(in_dtype(part, dtype) for part in value)
    if not isinstance(value, Tensor) or value.is_complex():
        return value
    return value.to(dtype)
