"""Where the experts of a mixture lie in its files, and how one of them is read and viewed.

An expert is known by a number of its own, its key: layer * width + its index in the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

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
from specexec_cli.offload.store import TensorRange


class ExpertTensors(dict[str, Tensor]):
    """An expert's tensors by their names in the checkpoint, as long as they are where they are."""

    __slots__ = ("prepared",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.prepared: object | None = None  # what their user made of them; let go with them


class ExpertFiles:
    """The experts of all layers in their files. Safe to read from several threads."""

    def __init__(self, layers: Sequence[Sequence[Sequence[TensorRange]]], piece_bytes: int) -> None:
        """Works out what is to be read; no file is opened yet.

        Args:
            layers: by layer and expert, the expert's tensors; no experts for a dense layer.
            piece_bytes: of the longest read.
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
        """Experts of all layers."""
        return len(self._layouts)

    def __contains__(self, key: int) -> bool:
        """Whether there is such an expert: a dense layer has none."""
        return key in self._layouts

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds any of the experts, a multiple of the disk's blocks."""
        largest = max(layout.buffer_bytes for layout in self._layouts.values())
        return -(-largest // BLOCK_BYTES) * BLOCK_BYTES

    def in_order(self, keys: Iterable[int]) -> list[int]:
        """Those of the keys that there are, in the order of the files."""
        return sorted((key for key in keys if key in self._rank), key=self._rank.__getitem__)

    def first_byte(self, key: int) -> int:
        """Where in what is read of an expert its first tensor begins."""
        return self._layouts[key].places[0][1]

    def n_bytes(self, key: int) -> int:
        """What is read of an expert, in whole blocks; 0 where there is none of this number."""
        return self._layouts[key].buffer_bytes if key in self._layouts else 0

    def tensor_bytes(self, key: int) -> int:
        """What an expert's tensors take."""
        return self._layouts[key].tensor_bytes

    def open(self, notice: Notice) -> None:
        """Opens the files.

        Args:
            notice: told in one line when reading will be slower than it could be.
        Raises:
            StreamError: one cannot be opened.
        """
        open_files(self._files, list(self._layouts.values()), once(notice))

    def pieces(self, key: int, slot: int) -> list[Part]:
        """What brings an expert into a slot."""
        return [Part(slot, piece) for piece in self._pieces[key]]

    def neighbours(self, before: int, after: int) -> bool:
        """Whether one read may bring both experts of a layer, the second of which lies later."""
        first, second = self._layouts[before].extents[0], self._layouts[after].extents[0]
        return before // self.width == after // self.width and follows(first, second)

    def joined(self, parts: Iterable[Part]) -> list[Read]:
        """The fewest reads that bring all parts, each no longer than a piece may be."""
        return join(parts, self._piece_bytes)

    def read(self, read: Read, slots: Sequence[memoryview], spare: memoryview) -> int:
        """Brings each part of a read into its slot; see scattered() and DirectFile.scatter."""
        targets, copies = scattered(read, slots, spare)
        count = self._files[read.path].scatter(targets, read.start, read.stop)
        for target, source in copies:
            target[:] = source
        return count

    def tensors(self, key: int, blob: Tensor, shift: int) -> ExpertTensors:
        """An expert's tensors as views of `blob`, into which it was read from byte `shift` on."""
        return ExpertTensors(views(self._layouts[key], blob, shift))

    def close(self) -> None:
        """Idempotent."""
        for file in self._files.values():
            file.close()


def _place(layout: Layout) -> tuple[str, int]:
    first = layout.extents[0]
    return str(first.path), first.start
