"""Where the experts of a mixture lie in its files, and how one of them is read and viewed.

An expert is known by a number of its own, its key: layer * width + its index in the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

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
        self.pieces: dict[int, list[Extent]] = {
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
        """What is read of an expert, in whole blocks."""
        return self._layouts[key].buffer_bytes

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

    def read(self, piece: Extent, target: memoryview) -> int:
        """Reads one piece; see DirectFile.read_into."""
        return self._files[piece.path].read_into(target, piece.start, piece.stop)

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
