"""Writes a sharded safetensors checkpoint tensor by tensor, with at most one in memory.

Names, dtypes and shapes are known before the first weight, so headers are written first. The module
knows neither models nor torch: tensors come as bytes. Source of the format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Literal

from specexec_cli.errors import StreamError
from specexec_cli.offload.checkpoint import ITEM_BYTES, TensorRange

SHARD_BYTES = 4_000_000_000  # most bytes of tensors in one file, unless one tensor is larger
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor that is to be written."""

    name: str
    dtype: str  # safetensors' name, a key of ITEM_BYTES
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class CheckpointWriter:
    """The weight files of a new checkpoint folder; tensors are written in the order given.

    Every method raises OSError where the disk takes no more.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Sequence[NewTensor],
        shard_bytes: int = SHARD_BYTES,
        there: int = 0,
    ) -> None:
        """Plan the files and, if there are several, write their index; no weights yet.

        Args:
            folder: an existing folder.
            tensors: all tensors of the checkpoint, in the order in which they will be written.
            shard_bytes: most bytes of tensors in one file, unless one tensor is larger.
            there: how many of them, from the first on, a writer of the same tensors wrote into this
                folder and flushed before it was ended.
        """
        self._shards = _cut(tensors, shard_bytes)
        count = len(self._shards)
        self._names = ["model.safetensors"] if count == 1 else [
            f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)
        ]  # fmt: skip
        self._folder = folder
        self._next = iter(
            [(index, tensor) for index, shard in enumerate(self._shards) for tensor in shard]
        )
        self._shard = -1  # index of the open file
        self._file: IO[bytes] | None = None
        if count > 1:
            self._write_index()
        for _ in range(there):
            index, tensor = next(self._next)
            if index != self._shard:
                self._open(index, "r+b")
            assert self._file is not None
            self._file.seek(tensor.n_bytes, os.SEEK_CUR)

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """Writes the next tensor.

        Args:
            name: must be the name of the next tensor, so that none is forgotten.
            pieces: bytes-like objects, together all of the tensor's bytes.
        """
        index, tensor = next(self._next)
        assert tensor.name == name, f"{tensor.name} is next, not {name}"
        if index != self._shard:
            self._open(index)
        assert self._file is not None
        written = 0
        for piece in pieces:
            written += self._file.write(piece)
        assert written == tensor.n_bytes, f"{name}: {written} of {tensor.n_bytes} bytes"

    def copy(self, tensor: TensorRange, name: str) -> None:
        """Writes the next tensor, byte for byte from another file.

        Raises:
            StreamError: the other file cannot be read.
        """
        self.write(name, _pieces(tensor))

    def finish(self) -> None:
        """Ends the checkpoint after its last tensor; all bytes are on the disk then."""
        assert next(self._next, None) is None, "tensors are missing"
        self.close()

    def flush(self) -> None:
        """What was written so far is on the disk behind it."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flushes the open file to the disk and closes it. Idempotent."""
        try:
            self.flush()
        finally:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _open(self, index: int, mode: Literal["wb", "r+b"] = "wb") -> None:
        self.close()
        self._shard = index
        self._file = (self._folder / self._names[index]).open(mode)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in self._shards[index]:
            begin, end = end, end + tensor.n_bytes
            header[tensor.name] = {
                "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end],
            }  # fmt: skip
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begins aligned
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _write_index(self) -> None:
        placed = zip(self._names, self._shards, strict=True)
        weight_map = {tensor.name: name for name, shard in placed for tensor in shard}
        total = sum(tensor.n_bytes for shard in self._shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        path = self._folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _cut(tensors: Sequence[NewTensor], shard_bytes: int) -> list[list[NewTensor]]:
    """Cuts the tensors into consecutive groups, one for each file; at least one group."""
    shards: list[list[NewTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.n_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.n_bytes
    return shards


def _pieces(tensor: TensorRange) -> Iterator[bytes]:
    """A tensor's bytes; a failure is the source's, not that of the file being written."""
    try:
        with tensor.path.open("rb") as source:
            source.seek(tensor.start)
            for done in range(0, tensor.n_bytes, _PIECE_BYTES):
                yield source.read(min(_PIECE_BYTES, tensor.n_bytes - done))
    except OSError as error:
        raise StreamError(f"reading {tensor.path} failed: {error.strerror or error}") from error
