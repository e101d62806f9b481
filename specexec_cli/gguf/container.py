"""The header of a GGUF file: metadata, and where each tensor lies.

Counts, lengths and offsets come from whoever made the file, so each is checked against the file
before it is used. At most MAX_HEADER_BYTES are read, and nothing past the file's end.
Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.types import GGML_TYPES, OTHER_TYPES, GgmlType

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 100_000_000  # the largest vocabularies with their merges take 20 MB
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # of tensors in the file, unless its metadata says otherwise
_MOST_DIMENSIONS = 4
_MOST_NUMBERS = 1 << 21  # in arrays that are kept: a few for each token of the largest vocabularies
_STEP_BYTES = 4 << 20  # the header is read in pieces of this size

_STRING, _ARRAY = 8, 9
# number of a metadata type of fixed size -> struct's letter for it
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

Value = bool | int | float | str | list[Any]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as a header describes it."""

    name: str  # llama.cpp's name
    path: Path
    type: GgmlType
    shape: tuple[int, ...]  # PyTorch's order: a row's weights last
    start: int  # absolute file offset of the first byte
    stop: int  # absolute file offset behind the last byte


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The headers of a GGUF file, or of all parts of one that was split."""

    path: Path  # the one that was asked for
    metadata: Mapping[str, Value]  # of the first part
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do; the names of ollama's files do not tell."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def part_names(name: str) -> list[str]:
    """The names of all parts of a split file, from any part's name; `name` alone if it is whole.

    Raises:
        CheckpointError: there is no such part, as in 00004-of-00003.
    """
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    number, count = int(found["number"]), int(found["count"])
    if not 1 <= number <= count:
        raise CheckpointError(f"{name}: there is no part {number} of {count}: check the name")
    return [f"{found['stem']}-{each:05}-of-{count:05}.gguf" for each in range(1, count + 1)]


# within read_once(): the files read so far, each with the state that its parts had
_READ: ContextVar[dict[Path, tuple[object, GgufFile]] | None] = ContextVar("_READ", default=None)


@contextmanager
def read_once() -> Iterator[None]:
    """Within the block read_gguf() reads a file that does not change once.

    A header with a vocabulary of 262,144 takes a tenth of a second; planning, opening and the
    tokenizer each ask for it.
    """
    if _READ.get() is not None:
        yield
        return
    token = _READ.set({})
    try:
        yield
    finally:
        _READ.reset(token)


def read_gguf(path: Path) -> GgufFile:
    """The headers of a GGUF file and of all its parts, fully checked.

    Raises:
        CheckpointError: a file is missing, truncated, inconsistent, or of a kind that is not read.
    """
    parts = [path.parent / name for name in part_names(path.name)]
    read = _READ.get()
    if read is None:
        return _read_parts(path, parts)
    try:
        state = [(each.st_ino, each.st_size, each.st_mtime_ns) for each in map(os.stat, parts)]
    except OSError:
        return _read_parts(path, parts)  # which says what is wrong
    if path not in read or read[path][0] != state:
        read[path] = state, _read_parts(path, parts)
    return read[path][1]


def _read_parts(path: Path, parts: list[Path]) -> GgufFile:
    headers = [_read_header(part) for part in parts]
    metadata = headers[0][0]
    _check_parts(parts, [part_metadata for part_metadata, _ in headers])
    tensors: dict[str, GgufTensor] = {}
    for _, own in headers:
        for tensor in own:
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{tensor.path}: tensor {shown(tensor.name)} is there twice; "
                    "the file is damaged, download it again"
                )
            tensors[tensor.name] = tensor
    expected = metadata.get("split.tensors.count")
    if len(parts) > 1 and isinstance(expected, int) and expected != len(tensors):
        raise CheckpointError(
            f"{path}: its parts hold {len(tensors)} tensors, the first says {expected}: "
            "they are of different models, download all of them again"
        )
    return GgufFile(path, metadata, tensors)


def _check_parts(parts: list[Path], metadata: list[Mapping[str, Value]]) -> None:
    for number, (part, own) in enumerate(zip(parts, metadata, strict=True)):
        count = own.get("split.count", 0)
        if count not in (0, len(parts)) or (len(parts) > 1 and own.get("split.no") != number):
            raise CheckpointError(
                f"{part} says that it is part {shown(own.get('split.no'))} of {shown(count)} "
                f"(from 0), its name that it is {number} of {len(parts)}: "
                "give the files the names that they were downloaded with"
            )


def shown(value: Value | None) -> str:
    """A value of the metadata, cut to fit into a message."""
    text = repr(value[:60] if isinstance(value, str | list) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read_header(path: Path) -> tuple[Mapping[str, Value], list[GgufTensor]]:
    """Metadata and tensors of one file, the tensors in the order of their bytes."""
    try:
        with path.open("rb") as file:
            cursor = _Cursor(path, file)
            return _parse(cursor)
    except FileNotFoundError:
        raise CheckpointError(f"no file {path}: download the model again") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


class _Cursor:
    """Reads a header from front to back, in pieces, and never beyond the file's end."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self.file_bytes = file.seek(0, 2)
        file.seek(0)
        self._most = min(self.file_bytes, MAX_HEADER_BYTES)
        self._data = b""
        self.at = 0
        self._numbers_left = _MOST_NUMBERS

    @property
    def left(self) -> int:
        """Most bytes that the rest of the header can have."""
        return self._most - self.at

    def reach(self, size: int, what: str) -> int:
        """Moves past the next `size` bytes, which are then in `_data`; returns their start."""
        if size > self.left:
            if self._most < self.file_bytes:
                raise self.refusal(f"{what}, and its header has more than {self._most} bytes")
            raise self.refusal(
                f"{what} needs {size} bytes at byte {self.at} but the file has only "
                f"{self.file_bytes}"
            )
        start, self.at = self.at, self.at + size
        missing = self.at - len(self._data)
        if missing > 0:
            wanted = max(missing, _STEP_BYTES, len(self._data))
            piece = self._file.read(min(wanted, self._most - len(self._data)))
            self._data += piece
            if len(piece) < missing:  # it became shorter since it was opened
                raise self.refusal(f"{what} lies behind its end")
        return start

    def numbers(self, letters: str, what: str) -> tuple[Any, ...]:
        """The next numbers; `letters` are struct's letters of their types."""
        form = "<" + letters
        start = self.reach(struct.calcsize(form), what)
        return struct.unpack_from(form, self._data, start)

    def array(self, letter: str, count: int, what: str) -> list[Any] | None:
        """The next `count` numbers of one type; skips them and returns None if they are too many.

        Python would keep them in many times their bytes.
        """
        if count > self._numbers_left:
            self.reach(count * struct.calcsize("<" + letter), what)
            return None
        self._numbers_left -= count
        return list(self.numbers(f"{count}{letter}", what))

    def text(self, what: str) -> str:
        """The next string."""
        (length,) = self.numbers("Q", what)
        start = self.reach(length, what)
        try:
            return self._data[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise self.refusal(f"{what} is not UTF-8 text") from None

    def texts(self, count: int, what: str) -> list[str]:
        """The next `count` strings, read fast: vocabularies have hundreds of thousands."""
        unpack = struct.Struct("<Q").unpack_from
        found = []
        data, at = self._data, self.at
        for _ in range(count):
            stop = at + 8
            if stop <= len(data):  # the work of `text` in one go, if the string has been read
                stop += unpack(data, at)[0]
            if stop <= len(data):
                try:
                    found.append(data[at + 8 : stop].decode())
                except UnicodeDecodeError:
                    raise self.refusal(f"{what} is not UTF-8 text") from None
                at = stop
                continue
            self.at = at
            found.append(self.text(what))
            data, at = self._data, self.at
        self.at = at
        return found

    def refusal(self, reason: str) -> CheckpointError:
        """The error that says what is wrong with the file, and what to do about it."""
        return CheckpointError(
            f"{self.path}: {reason}; it is truncated or damaged, download it again"
        )


def _parse(cursor: _Cursor) -> tuple[Mapping[str, Value], list[GgufTensor]]:
    if cursor.file_bytes < 24:
        raise cursor.refusal(f"it has only {cursor.file_bytes} bytes")
    magic, version = cursor.numbers("4sI", "the beginning")
    if magic != MAGIC:
        raise CheckpointError(f"{cursor.path} is not a GGUF file: it begins with {magic!r}")
    if version not in _VERSIONS:
        if int.from_bytes(version.to_bytes(4, "big"), "little") in _VERSIONS:
            raise CheckpointError(
                f"{cursor.path} is a big-endian GGUF file, which is not read: "
                "get the little-endian one"
            )
        raise CheckpointError(
            f"{cursor.path} is GGUF version {version}, only 2 and 3 are read: get a newer file"
        )
    tensor_count, entry_count = cursor.numbers("QQ", "the beginning")
    # fewest bytes of an entry with an empty name: metadata of one byte, a tensor of no dimension
    if entry_count > cursor.left // 13 or tensor_count > cursor.left // 24:
        raise cursor.refusal(
            f"{tensor_count} tensors and {entry_count} entries of metadata are impossible in "
            f"{cursor.file_bytes} bytes"
        )
    metadata = _parse_metadata(cursor, entry_count)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.refusal(f"alignment {shown(alignment)} is not a power of two")
    if alignment % 8:  # kernels read whole words, and the format demands it
        raise cursor.refusal(f"alignment {alignment} is not a multiple of 8")
    entries = [_parse_entry(cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors = [_placed(cursor, *entry, data_start, alignment) for entry in entries]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    for before, after in pairwise(tensors):
        if after.start < before.stop:
            raise cursor.refusal(f"tensors {shown(before.name)} and {shown(after.name)} overlap")
    return metadata, tensors


def _parse_metadata(cursor: _Cursor, count: int) -> Mapping[str, Value]:
    """All metadata except arrays of more numbers than vocabularies have, which nobody needs."""
    metadata: dict[str, Value] = {}
    keys: set[str] = set()
    for index in range(count):
        key = cursor.text(f"the name of metadata entry {index}")
        if key in keys:
            raise cursor.refusal(f"metadata {shown(key)} is there twice")
        keys.add(key)
        (kind,) = cursor.numbers("I", f"the type of {shown(key)}")
        value = _parse_value(cursor, kind, f"metadata {shown(key)}")
        if value is not None:
            metadata[key] = value
        elif key.startswith("tokenizer."):
            raise cursor.refusal(f"metadata {shown(key)} has more numbers than vocabularies have")
    return metadata


def _parse_value(cursor: _Cursor, kind: int, what: str) -> Value | None:
    """The next value; None for an array that is skipped."""
    if kind in _SCALARS:
        value: Value = cursor.numbers(_SCALARS[kind], what)[0]
        return value
    if kind == _STRING:
        return cursor.text(what)
    if kind != _ARRAY:
        raise cursor.refusal(f"{what} is of type {kind}, which there is not")
    item, count = cursor.numbers("IQ", what)
    if item not in _SCALARS and item != _STRING:
        raise cursor.refusal(f"{what} is an array of type {item}, which is not read")
    least = 8 if item == _STRING else struct.calcsize("<" + _SCALARS[item])
    if count > cursor.left // least:
        raise cursor.refusal(f"{what} has {count} items, for which the file is too short")
    if item == _STRING:
        return cursor.texts(count, what)
    return cursor.array(_SCALARS[item], count, what)


def _parse_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape in PyTorch's order, type and offset of the next tensor."""
    name = cursor.text("the name of a tensor")
    what = f"tensor {shown(name)}"
    (dimensions,) = cursor.numbers("I", what)
    if dimensions > _MOST_DIMENSIONS:
        raise cursor.refusal(f"{what} has {dimensions} dimensions, more than {_MOST_DIMENSIONS}")
    shape = cursor.numbers(f"{dimensions}Q", what)
    kind, offset = cursor.numbers("IQ", what)
    return name, shape[::-1], kind, offset


def _placed(
    cursor: _Cursor,
    name: str,
    shape: tuple[int, ...],
    kind: int,
    offset: int,
    data_start: int,
    alignment: int,
) -> GgufTensor:
    """The tensor at its place, after checks that its bytes lie in the file."""
    what = f"tensor {shown(name)}"
    if kind not in GGML_TYPES:
        if kind in OTHER_TYPES:
            raise CheckpointError(
                f"{cursor.path}: {what} is of type {OTHER_TYPES[kind]}, which is not read; read "
                f"are {', '.join(known.name for known in GGML_TYPES.values())}: get another file "
                "of the model, such as Q4_K_M"
            )
        raise cursor.refusal(f"{what} is of type {kind}, which there is not")
    ggml_type = GGML_TYPES[kind]
    row = shape[-1] if shape else 1
    if row % ggml_type.block_weights:
        raise cursor.refusal(
            f"{what} has rows of {row} weights, {ggml_type.name} has blocks of "
            f"{ggml_type.block_weights}"
        )
    if offset % alignment:
        raise cursor.refusal(f"{what} lies at offset {offset}, no multiple of {alignment}")
    start = data_start + offset
    stop = start + ggml_type.bytes_of(prod(shape))
    if stop > cursor.file_bytes:
        raise cursor.refusal(
            f"{what} ends at byte {stop} but the file has only {cursor.file_bytes}"
        )
    return GgufTensor(name, cursor.path, ggml_type, shape, start, stop)
