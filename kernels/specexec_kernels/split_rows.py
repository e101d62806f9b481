"""Keys, or values, of a text whose first rows are shared with other texts, and the rest its own.

Shared rows lie in blocks of BLOCK_SLOTS slots that nobody writes to. Each text has a list of its
blocks, and a block lasts as long as some text has it: texts that begin alike are a prefix tree over
blocks. Attention kernels read blocks where they lie. Other code that is given such rows finds them
in one piece, a copy, as soon as it looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

BLOCK_SLOTS = 64  # a multiple of the slots that any attention kernel takes at once


@dataclass(frozen=True, eq=False)
class FrontRows:
    """The shared blocks that a text begins with.

    Attributes:
        blocks: (heads, BLOCK_SLOTS, dimensions of a head) each, contiguous; never written to.
    """

    blocks: tuple[Tensor, ...] = ()

    @property
    def slots(self) -> int:
        """Slots of all blocks."""
        return len(self.blocks) * BLOCK_SLOTS

    def first(self, blocks: int) -> FrontRows:
        """Some of the blocks, the first."""
        return self if blocks == len(self.blocks) else FrontRows(self.blocks[:blocks])

    def longer(self, rows: Tensor) -> FrontRows:
        """With copies of (1, heads, slots, dimensions) rows behind it, whole blocks of them."""
        new = (
            rows[0, :, start : start + BLOCK_SLOTS].clone(memory_format=torch.contiguous_format)
            for start in range(0, rows.shape[2], BLOCK_SLOTS)
        )
        return FrontRows((*self.blocks, *new))

    def pieces(self, start: int, stop: int) -> list[Tensor]:
        """Views of the slots start..stop, (1, heads, n, dimensions) each, as far as there are."""
        found = []
        for number in range(start // BLOCK_SLOTS, min(-(-stop // BLOCK_SLOTS), len(self.blocks))):
            before = number * BLOCK_SLOTS
            own = slice(max(start - before, 0), min(stop - before, BLOCK_SLOTS))
            found.append(self.blocks[number][None, :, own])
        return found

    @cached_property
    def addresses(self) -> Tensor:
        """Where the blocks lie, (blocks,) int64 on their device."""
        places = torch.tensor([block.data_ptr() for block in self.blocks], dtype=torch.int64)
        return places.to(self.blocks[0].device)


NO_FRONT = FrontRows()


def _operator(name: str) -> Callable[..., Any]:
    """A method that does what the tensor of all rows does; operators are looked up in the class."""
    return lambda rows, *args: getattr(rows.whole, name)(*map(_in_one_piece, args))


class SplitRows:
    """Shared rows and the rows behind them, in place of one (1, heads, slots, dimensions) tensor.

    Args:
        front: the shared rows, one block or more.
        own: (1, heads, slots, dimensions) the rows behind them.
    """

    def __init__(self, front: FrontRows, own: Tensor) -> None:
        self.front = front
        self.own = own

    @cached_property
    def whole(self) -> Tensor:
        """All rows in one piece, a copy."""
        return torch.cat([*self.front.pieces(0, self.front.slots), self.own], dim=2)

    @property
    def shape(self) -> torch.Size:
        """The shape of all rows."""
        batch, heads, slots, dimensions = self.own.shape
        return torch.Size((batch, heads, self.front.slots + slots, dimensions))

    def __getattr__(self, name: str) -> Any:
        if name in ("front", "own", "whole"):  # of an object that is being copied
            raise AttributeError(name)
        return getattr(self.whole, name)

    # What models' code does with keys and values.
    __getitem__ = _operator("__getitem__")
    __matmul__ = _operator("__matmul__")
    __mul__ = _operator("__mul__")
    __rmul__ = _operator("__rmul__")
    __truediv__ = _operator("__truediv__")
    __add__ = _operator("__add__")
    __radd__ = _operator("__radd__")
    __sub__ = _operator("__sub__")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = {name: _in_one_piece(value) for name, value in (kwargs or {}).items()}
        return func(*map(_in_one_piece, args), **found)


def in_one_piece(rows: Tensor | SplitRows) -> Tensor:
    """Rows as one tensor."""
    return rows.whole if isinstance(rows, SplitRows) else rows


def _in_one_piece(value: Any) -> Any:
    """Rows as one tensor, alone or in a list; anything else as it is."""
    if isinstance(value, list | tuple):
        return type(value)(map(_in_one_piece, value))
    return in_one_piece(value)


def joined(pieces: Iterable[Tensor]) -> Tensor:
    """(1, heads, n, dimensions) rows one behind the other; a view where there is one piece."""
    found = list(pieces)
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)
