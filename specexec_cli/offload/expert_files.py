"""Where the experts of a mixture lie in its files, and how one of them is read and viewed.

An expert's key is the number layer * width + its index in the layer, where width is the number of
experts in the layer that has the most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.expert_reads import Part, Read, follows, join, scattered
from specexec_cli.offload.reader import (
    BLOCK_BYTES,
    DirectFile,
    Extent,
    Layout,
    Notice,
    lay_out,
    once,
)
from specexec_cli.offload.resident import open_files, views


class ExpertTensors(dict[str, Tensor]):
    """An expert's tensors by their names in the checkpoint, valid while it stays in its place."""

    __slots__ = ("prepared",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.prepared: object | None = None  # what their user made from them; dropped with them


class ExpertFiles:
    """The experts of all layers in their files. Safe to read from several threads."""

    def __init__(self, layers: Sequence[Sequence[Sequence[TensorRange]]], piece_bytes: int) -> None:
        """Works out what is to be read; no file is opened yet.

        Args:
            layers: for each layer, for each expert, its tensors; a dense layer has no experts.
            piece_bytes: most bytes of one read.
        """
        self.width = max(map(len, layers))
        self._layouts: dict[int, Layout] = {
            layer * self.width + index: lay_out(tensors)
            for layer, experts in enumerate(layers)
            for index, tensors in enumerate(experts)
        }
        places = {key: _place(layout) for key, layout in self._layouts.items()}
        self._rank = {key: n for n, key in enumerate(sorted(places, key=places.__getitem__))}
        self._piece_bytes = piece_bytes
        self._pieces: dict[int, list[Extent]] = {
            key: layout.pieces(piece_bytes) for key, layout in self._layouts.items()
        }
        self._files: dict[Path, DirectFile] = {}

    def __len__(self) -> int:
        """The number of experts in all layers."""
        return len(self._layouts)

    def __contains__(self, key: int) -> bool:
        """Whether an expert has this key; a dense layer has no experts."""
        return key in self._layouts

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that can hold any expert; a multiple of BLOCK_BYTES."""
        largest = max(layout.buffer_bytes for layout in self._layouts.values())
        return -(-largest // BLOCK_BYTES) * BLOCK_BYTES

    def in_order(self, keys: Iterable[int]) -> list[int]:
        """The keys that belong to an expert, in the order of the experts in the files."""
        return sorted((key for key in keys if key in self._rank), key=self._rank.__getitem__)

    def first_byte(self, key: int) -> int:
        """Where an expert's first tensor begins, in bytes from the first byte read for it."""
        return self._layouts[key].places[0][1]

    def n_bytes(self, key: int) -> int:
        """Bytes read for an expert, in whole blocks; 0 if no expert has this key."""
        return self._layouts[key].buffer_bytes if key in self._layouts else 0

    def tensor_bytes(self, key: int) -> int:
        """Bytes of an expert's tensors."""
        return self._layouts[key].tensor_bytes

    def open(self, notice: Notice) -> None:
        """Opens the files.

        Args:
            notice: called with one line of text if reading will be slower than it could be.
        Raises:
            StreamError: a file cannot be opened.
        """
        open_files(self._files, list(self._layouts.values()), once(notice))

    def pieces(self, key: int, slot: int) -> list[Part]:
        """The parts that together bring an expert into a slot."""
        return [Part(slot, piece) for piece in self._pieces[key]]

    def neighbours(self, before: int, after: int) -> bool:
        """Whether both experts are of one layer, and one read may bring `before`, then `after`."""
        first, second = self._layouts[before].extents[0], self._layouts[after].extents[0]
        return before // self.width == after // self.width and follows(first, second)

    def joined(self, parts: Iterable[Part]) -> list[Read]:
        """The fewest reads that bring all parts; no read is longer than piece_bytes."""
        return join(parts, self._piece_bytes)

    def read(self, read: Read, slots: Sequence[memoryview], spare: memoryview) -> int:
        """Brings each part of a read into its slot (see scattered()); returns the bytes read."""
        targets, copies = scattered(read, slots, spare)
        count = self._files[read.path].scatter(targets, read.start, read.stop)
        for target, source in copies:
            target[:] = source
        return count

    def tensors(self, key: int, blob: Tensor, shift: int) -> ExpertTensors:
        """An expert's tensors as views of `blob`, where the expert's bytes begin at `shift`."""
        return ExpertTensors(views(self._layouts[key], blob, shift))

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files.values():
            file.close()


def _place(layout: Layout) -> tuple[str, int]:
    first = layout.extents[0]
    return str(first.path), first.start
