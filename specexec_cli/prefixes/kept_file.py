"""The format of a file of rows: a header, and tensors in pieces that are read and checked alone.

A header of whole disk blocks begins with _MAGIC, the header's size and the checksum of the JSON
behind them. That JSON has the key of the segment, the tensors' dtypes and shapes, and a checksum of
each piece. A piece is as many tensors, one behind the other, as make PIECE_BYTES, and begins at a
disk block. Pieces are read and written past the page cache. The format is of this machine alone.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from specexec_cli.guarded import parse_json
from specexec_cli.kept import replacing
from specexec_cli.offload.checkpoint import ITEM_BYTES
from specexec_cli.offload.memory import HugeBuffer
from specexec_cli.offload.reader import BLOCK_BYTES, DirectFile

PIECE_BYTES = 4 << 20  # unless one tensor is larger
_MAGIC = b"SPXROWS1"
_HEAD = struct.Struct("<8sII")  # magic, bytes of the header, checksum of its JSON
_MOST_HEADER_BYTES = 1 << 20
_MOST_DIMENSIONS = 8
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # macOS has none


class DamagedError(Exception):
    """A file of rows that is not what was written; never shown."""


@dataclass(frozen=True, slots=True)
class Form:
    """Dtype, by safetensors' name, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tensors that are read together.

    Attributes:
        start: where it begins behind the header, a whole number of disk blocks.
        n_bytes: of its tensors.
        places: the index of each tensor, and where it begins in the piece.
    """

    start: int
    n_bytes: int
    places: tuple[tuple[int, int], ...]

    @property
    def padded_bytes(self) -> int:
        """Bytes that it takes on disk, in whole blocks."""
        return _whole_blocks(self.n_bytes)


def _whole_blocks(n_bytes: int) -> int:
    return -(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES


def pieces_of(forms: Sequence[Form]) -> list[Piece]:
    """How the tensors of these forms are put into pieces."""
    pieces: list[Piece] = []
    start = n_bytes = 0
    places: list[tuple[int, int]] = []
    for index, form in enumerate(forms):
        if places and n_bytes + form.n_bytes > PIECE_BYTES:
            pieces.append(Piece(start, n_bytes, tuple(places)))
            start, n_bytes, places = start + pieces[-1].padded_bytes, 0, []
        places.append((index, n_bytes))
        n_bytes += form.n_bytes
    if places:
        pieces.append(Piece(start, n_bytes, tuple(places)))
    return pieces


def file_bytes(forms: Sequence[Form]) -> int:
    """Bytes of a file with tensors of these forms, but for a large header's."""
    return BLOCK_BYTES + sum(piece.padded_bytes for piece in pieces_of(forms))


class Staging:
    """Memory for one piece at a time, on disk blocks and large pages."""

    def __init__(self) -> None:
        self._buffer: HugeBuffer | None = None

    def of(self, n_bytes: int) -> memoryview:
        """At least `n_bytes` of memory, whose content is undefined.

        Raises:
            OutOfMemoryError: there is not as much.
        """
        if self._buffer is None or self._buffer.n_bytes < n_bytes:
            self.close()
            self._buffer = HugeBuffer(
                max(n_bytes, PIECE_BYTES), "rows of a kept text", "Leave them out: `cache=False`"
            )
        return self._buffer.view

    def close(self) -> None:
        """Frees the memory; idempotent."""
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = None


def write_file(
    path: Path,
    key: bytes,
    forms: Sequence[Form],
    fill: Callable[[int, memoryview], None],
    staging: Staging,
) -> None:
    """Writes a file of rows, whole or not at all.

    Args:
        key: of the segment.
        fill: puts a tensor, by its index, into memory of its size. An error that it raises leaves
            no file behind.
    Raises:
        OSError: the disk takes no more.
    """
    pieces = pieces_of(forms)
    told = [[form.dtype, *form.shape] for form in forms]
    n_header = len(_header(key, told, [2**32 - 1] * len(pieces), 0))  # of the longest checksums
    with replacing(path) as partial:
        file = _opened_for_writing(partial)
        try:
            checksums = []
            for piece in pieces:
                view = staging.of(piece.padded_bytes)[: piece.padded_bytes]
                for index, at in piece.places:
                    fill(index, view[at : at + forms[index].n_bytes])
                view[piece.n_bytes :] = bytes(piece.padded_bytes - piece.n_bytes)
                checksums.append(zlib.crc32(view[: piece.n_bytes]))
                _write(file, view, n_header + piece.start)
            view = staging.of(n_header)[:n_header]
            view[:] = _header(key, told, checksums, n_header)
            _write(file, view, 0)
        finally:
            os.close(file)


def _header(
    key: bytes, told: Sequence[Sequence[object]], checksums: Sequence[int], least_bytes: int
) -> bytes:
    text = json.dumps({"key": key.hex(), "tensors": told, "pieces": list(checksums)}).encode()
    n_bytes = max(_whole_blocks(_HEAD.size + len(text)), least_bytes)
    text = text.ljust(n_bytes - _HEAD.size)
    return _HEAD.pack(_MAGIC, n_bytes, zlib.crc32(text)) + text


def _opened_for_writing(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | _O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)  # a file system, such as one in memory, without O_DIRECT


def _write(file: int, view: memoryview, start: int) -> None:
    while view:
        count = os.pwrite(file, view, start)
        view, start = view[count:], start + count


class KeptFile:
    """A file of rows, opened and its header checked.

    Args:
        path: of the file.
        key: of the segment that it should keep.
    Raises:
        DamagedError: it is not what was written, or of another segment.
        StreamError: it cannot be read, or is gone.
    """

    def __init__(self, path: Path, key: bytes, staging: Staging) -> None:
        self._file = DirectFile(path, lambda text: None)
        self._staging = staging
        try:
            self.forms, self._checksums, self._n_header = self._read_header(key)
            self._pieces = pieces_of(self.forms)
            sizes = sum(piece.padded_bytes for piece in self._pieces)
            if len(self._checksums) != len(self._pieces):
                raise DamagedError("a checksum for each piece")
            if self._file.n_bytes != self._n_header + sizes:
                raise DamagedError("the file's size")
        except BaseException:
            self.close()
            raise

    def _read_header(self, key: bytes) -> tuple[list[Form], list[int], int]:
        first = bytes(self._read(0, BLOCK_BYTES))
        if len(first) < BLOCK_BYTES:
            raise DamagedError("shorter than a header")
        magic, n_bytes, checksum = _HEAD.unpack_from(first)
        if magic != _MAGIC or n_bytes % BLOCK_BYTES or not 0 < n_bytes <= _MOST_HEADER_BYTES:
            raise DamagedError("no header")
        text = bytes(self._read(0, n_bytes))[_HEAD.size :]
        if len(text) != n_bytes - _HEAD.size or zlib.crc32(text) != checksum:
            raise DamagedError("the header's checksum")
        try:
            told = parse_json(text)
            if told["key"] != key.hex():
                raise DamagedError("another segment's key")
            forms = [_form(each) for each in told["tensors"]]
            checksums = [int(each) for each in told["pieces"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError("the header's JSON") from error
        return forms, checksums, n_bytes

    def _read(self, start: int, n_bytes: int) -> memoryview:
        """So many bytes, whole blocks, fewer where the file ends before."""
        view = self._staging.of(n_bytes)[:n_bytes]
        return view[: self._file.read_into(view, start, start + n_bytes)]

    def tensors(self) -> Iterator[tuple[int, memoryview]]:
        """The index of each tensor, and its bytes, which are valid until the next one's.

        Raises:
            DamagedError: a piece is not what was written.
            StreamError: a piece cannot be read.
        """
        for piece, checksum in zip(self._pieces, self._checksums, strict=True):
            view = self._read(self._n_header + piece.start, piece.padded_bytes)[: piece.n_bytes]
            if len(view) < piece.n_bytes or zlib.crc32(view) != checksum:
                raise DamagedError("a piece's checksum")
            for index, at in piece.places:
                yield index, view[at : at + self.forms[index].n_bytes]

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._file.close()


def _form(told: Any) -> Form:
    dtype, *shape = told
    if dtype not in ITEM_BYTES or len(shape) > _MOST_DIMENSIONS:
        raise ValueError("no tensor")
    if not all(type(size) is int and 0 < size < 2**40 for size in shape):
        raise ValueError("no shape")
    return Form(dtype, tuple(shape))
