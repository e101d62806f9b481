"""Runs rows of several texts in one pass: together in products, each text alone in attention.

A decoder layer's norms, projections and MLP treat each row by itself, so rows of several texts go
through them together and the layer's weights are read once. Only attention reads other rows: those
in the text's own cache. A layer appends the rows of a chunk to their texts' caches and gets the
keys of all texts as one `KeysByText`, which the attention function (attention.py) takes apart.

A few architectures compute with the keys between cache and attention, or have attention code of
their own. In these the texts take turns within each layer; the weights are still read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specexec_cli.core import Piece
from specexec_cli.models.kv_cache import Rows, SlotLayer
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.pass_rows import PassRows


class KeysTouchedError(Exception):
    """A layer computes with the keys from its cache, so texts must take turns; never shown."""


class KeysByText:
    """The keys, or values, of all texts of a pass; any use outside attention raises an error.

    Args:
        parts: (1, heads, slots, head_dim) for each text; None for a text without rows.
    """

    def __init__(self, parts: Sequence[Rows | None]) -> None:
        self.parts = parts

    def __getattr__(self, name: str) -> NoReturn:
        raise KeysTouchedError(name)

    def __getitem__(self, key: Any) -> NoReturn:
        raise KeysTouchedError("indexing")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise KeysTouchedError(func.__name__)


@dataclass(frozen=True, slots=True)
class MaskByText:
    """The masks of a chunk with rows of several texts."""

    pieces: Sequence[Piece]
    masks: Sequence[Any]  # one for each piece, in the form that attention takes for one text


class SideBySide:
    """The order of several texts' rows in one pass, one text after another.

    Args:
        parts: each text's rows.
        turns: whether texts take turns in each layer; see the module's docstring.
    """

    def __init__(self, parts: Sequence[PassRows], turns: bool) -> None:
        self.parts = parts
        self.turns = turns
        self.now: Sequence[Piece] = ()  # the chunk that a layer runs now

    @property
    def every_piece(self) -> list[Piece]:
        """The rows of all texts as one chunk."""
        return [Piece(text, 0, len(rows.tokens)) for text, rows in enumerate(self.parts)]

    @property
    def by_text(self) -> bool:
        """Whether attention is given the keys of all texts at once."""
        return len(self.parts) > 1 and not self.turns

    def chunks(self, most: int) -> Iterator[Sequence[Piece]]:
        """Divides the pass's rows, in order, into chunks of at most `most` rows.

        Rows that see later ones of their text, as those of a block do that a head drafts in one
        pass, are in one chunk with these, if they are no more than `most`.
        """
        chunk: list[Piece] = []
        for text, rows in enumerate(self.parts):
            start, total = 0, len(rows.tokens)
            while start < total:
                room = most - sum(piece.count for piece in chunk)
                stop = min(start + room, total)
                if stop < total and stop > rows.pending and _sees_later(rows, most):
                    stop = max(start, rows.pending)
                if stop > start:
                    chunk.append(Piece(text, start, stop))
                start = stop
                if self.turns or start < total or sum(piece.count for piece in chunk) == most:
                    yield chunk
                    chunk = []
        if chunk:
            yield chunk


def _sees_later(rows: PassRows, most: int) -> bool:
    """Whether rows behind the pending ones, `most` or fewer, see some behind them."""
    return len(rows.tree_mask) <= most and bool(np.triu(rows.tree_mask, 1).any())


class _TextsLayer(CacheLayerMixin):
    """One layer's keys and values of all texts in a pass."""

    def __init__(self, layers: Sequence[Any], rows: SideBySide) -> None:
        super().__init__()
        self._layers = layers
        self._rows = rows
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: each text's own layer takes its sizes from its first rows."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Any, Any]:
        """Appends each row to its own text's cache.

        Args:
            key_states, value_states: (1, heads, rows, head_dim) of the present chunk.
        Returns:
            every filled row of all texts of the pass; of one text if texts take turns.
        """
        pieces, first = self._rows.now, 0
        for piece in pieces:
            own = slice(first, first + piece.count)
            found = self._layers[piece.text].update(key_states[:, :, own], value_states[:, :, own])
            first += piece.count
        if not self._rows.by_text:
            return found
        # Texts without rows in this chunk are included: layers that attend to this layer's keys
        # (Gemma-4) use the result of its last chunk.
        filled = [layer.filled() or (None, None) for layer in self._layers]
        keys, values = zip(*filled, strict=True)
        return KeysByText(keys), KeysByText(values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots of the longest text after `query_length` more rows, and the first slot."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Filled slots of the longest text."""
        return max(layer.length for layer in self._layers)

    def get_max_length(self) -> int:
        """-1: the caches grow as needed."""
        return -1


class _TextsState(_TextsLayer):
    """The states of all texts in a pass, for one layer that does not attend."""

    @property
    def parts(self) -> list[Any]:
        """The same for each part of a layer's state, see recurrent.Parts."""
        parts = zip(*(layer.parts for layer in self._layers), strict=True)
        return [_joint(layers, self._rows) for layers in parts]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Any, Any]:
        """See recurrent.Parts.update."""
        found: tuple[Any, Any] = self.parts[-1].update(key_states, value_states)
        return found

    def run(self, *rows: Tensor) -> Tensor:
        """Appends each row to its own text's state (see LayerState.run); returns all outputs."""
        dim, first, found = self._layers[0].row_dim, 0, []
        for piece in self._rows.now:
            own = (part.narrow(dim, first, piece.count) for part in rows)
            found.append(self._layers[piece.text].run(*own))
            first += piece.count
        return torch.cat(found, dim=dim)


def joint_state(states: Sequence[ModelState], rows: SideBySide) -> Cache:
    """A cache for transformers that passes each row on to its own text's state."""
    layers = zip(*(state.layers for state in states), strict=True)
    return Cache(layers=[_joint(each, rows) for each in layers])


def _joint(layers: Sequence[Any], rows: SideBySide) -> _TextsLayer:
    return (_TextsLayer if isinstance(layers[0], SlotLayer) else _TextsState)(layers, rows)
