"""Keys and values that are kept in another form, or elsewhere, than where attention reads them.

A pass brings those of each layer for that layer: all such layers of a text use the same buffers,
one after another. Attention finds there what it would find in a SlotLayer, so a row has the same
bits in every pass. Here they are kept in 8 bits on the device that computes; waiting_rows.py keeps
them in RAM beside a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specexec_kernels.eight_bit_kv import packed, unpack, unpacked_size
from specexec_kernels.split_rows import BLOCK_SLOTS, joined
from torch import Tensor

from specexec_cli.models.kv_cache import SlotLayer
from specexec_cli.models.layer_state import Ints

_JOINED_SLOTS = 16 * BLOCK_SLOTS  # that are unpacked at once: few calls, and they stay in a cache


class TurnBuffers:
    """The buffers that the layers of one text use in turn.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: tuple[Tensor, ...] = ()
        self._holder: TurnLayer | None = None  # whose rows the buffers hold

    def bring(self, layer: TurnLayer, count: int) -> tuple[Tensor, ...]:
        """Buffers of the layer's capacity that hold its first `count` keys and values."""
        shapes = layer.shapes
        fits = [each.shape for each in self._buffers] == shapes
        if fits and self._holder is layer:
            return self._buffers  # the rows of this pass up to here were written there as well
        if not fits:
            self._buffers = ()  # before the new ones, which may need their memory
            self._buffers = tuple(
                torch.empty(shape, dtype=layer.row_dtype, device=self.device) for shape in shapes
            )
        self._holder = layer
        shared = layer.shared_slots
        for there, front, here in zip(
            self._buffers, layer.front, (layer.keys, layer.values), strict=True
        ):
            for start in range(0, shared, _JOINED_SLOTS):
                stop = min(start + _JOINED_SLOTS, shared)
                layer.fetch(there[:, :, start:stop], joined(front.pieces(start, stop)))
            layer.fetch(there[:, :, shared:count], here[:, :, : count - shared])
        return self._buffers

    def rows_of(self, layer: TurnLayer) -> tuple[Tensor, ...] | None:
        """All keys and values of the layer that the pass is in; None of another one."""
        if self._holder is not layer:
            return None
        return tuple(each[:, :, : layer.length] for each in self._buffers)

    def leave(self, layer: TurnLayer) -> None:
        """Forgets the layer's rows, which may change from now on."""
        if self._holder is layer:
            self._holder = None


class TurnLayer(SlotLayer):
    """Keys and values of one layer, of which a pass sees copies in a text's TurnBuffers.

    Args:
        there: the buffers.
        eight_bit: the dtype that a pass sees them in, where they are kept in 8 bits; None keeps
            them as they come.
    """

    def __init__(self, there: TurnBuffers, eight_bit: torch.dtype | None) -> None:
        super().__init__()
        self._there = there
        self._eight_bit = eight_bit

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype that a pass sees keys and values in."""
        return self._eight_bit or self.keys.dtype

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes of all slots' keys and values as a pass sees them."""
        kept = [
            torch.Size((*each.shape[:2], self.shared_slots + each.shape[2], each.shape[3]))
            for each in (self.keys, self.values)
        ]
        if self._eight_bit is None:
            return kept
        return [torch.Size((*shape[:3], unpacked_size(shape[3]))) for shape in kept]

    def fetch(self, there: Tensor, here: Tensor) -> None:
        """Fills slots of a buffer, `there`, with the same slots as they are kept."""
        unpack(here, there)

    def store(self, here: Tensor, rows: Tensor) -> None:
        """Fills slots, `here`, with rows in the form that they are kept in."""
        here.copy_(rows)

    def begin(self, parents: Ints, pending: int) -> None:
        """See LayerState; rows may have moved since the last pass."""
        super().begin(parents, pending)
        self._there.leave(self)

    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> tuple[Tensor, Tensor]:
        """See SlotLayer; what comes back are the buffers."""
        kept = rows if self._eight_bit is None else tuple(map(packed, rows))
        if not self.is_initialized:
            self.lazy_initialization(*kept)
        start, own = self.claim(rows[0].shape[2]), (self.keys, self.values)
        shared = self.shared_slots
        new, kept_at = slice(start, self.length), slice(start - shared, self.length - shared)
        for there, here, each in zip(self._there.bring(self, start), own, kept, strict=True):
            if self._eight_bit is None:
                there[:, :, new] = each
                self.store(here[:, :, kept_at], there[:, :, new])
            else:
                unpack(each, there[:, :, new])
                self.store(here[:, :, kept_at], each)
        found = self._there.rows_of(self)
        assert found is not None, "the rows have just been brought"
        keys, values = found
        return keys, values

    def filled(self) -> tuple[Tensor, ...] | None:
        """See SlotLayer: the buffers, while the pass is in this layer."""
        return self._there.rows_of(self)

    def first_rows(self, count: int) -> Sequence[Tensor]:
        """See SlotLayer."""
        if self._eight_bit is None:
            return super().first_rows(count)
        found = []
        for here, shape in zip(self.kept_rows(0, count), self.shapes, strict=True):
            sizes = (*shape[:2], count, shape[3])
            found.append(torch.empty(sizes, dtype=self._eight_bit, device=here.device))
            unpack(here, found[-1])
        return found
