"""Files that sessions keep for later ones: written whole, and checked when they are read."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexec_cli import guarded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LARGEST_BYTES = 4_000_000  # several times the largest that is written
_SEAL_BYTES = 65  # a digest in hexadecimal, and the end of its line
_LONGEST_NAME = 200  # without an ending; file systems take 255 bytes


def file_name(*parts: str) -> str:
    """The parts, such as hub ids and folders, as one name that every file system takes."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "--".join(parts)).strip("-.")
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


@cache
def installed_version(package: str) -> str:
    """A package's version, by the folder that installers write for it.

    importlib.metadata, which is asked where there is no such folder, imports email, and that takes
    as long as reading models.toml.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    for folder in filter(None, sys.path):
        for told in Path(folder).glob(f"{package}-*.dist-info"):
            return told.name.removeprefix(f"{package}-").removesuffix(".dist-info")
    from importlib.metadata import version

    return version(package)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path`, which replaces `path` once the block has ended without an error.

    The file's name is this writer's own, so that two sessions never write into one file. If the
    block fails, the file is removed and `path` stays as it was. Only the user may read the file.

    Raises:
        OSError: the folder cannot be written.
    """
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=".", suffix=".partial", delete=False
    ) as file:
        partial = Path(file.name)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Puts a value into the file, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=indent) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in a file that write_json wrote.

    Raises:
        ValueError: it is missing, cannot be read, or is not JSON.
    """
    try:
        return guarded.read_json(path, most_bytes=_LARGEST_BYTES)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def write_sealed(path: Path, content: bytes) -> None:
    """Puts bytes and their digest into the file, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_bytes(_seal(content) + content)


def read_sealed(path: Path) -> bytes:
    """The bytes in a file that write_sealed wrote: those, or an error.

    Raises:
        ValueError: it is missing, cannot be read, or is damaged anywhere.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    content = raw[_SEAL_BYTES:]
    if raw[:_SEAL_BYTES] != _seal(content):
        raise ValueError(f"{path} is damaged")
    return content


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"


def is_number(value: Any, lowest: float, highest: float) -> bool:
    """Whether `value` is a number from `lowest` to `highest`; a bool, an int to Python, is not."""
    return type(value) in (int, float) and lowest <= value <= highest  # NaN is between no bounds


def numbers(
    value: Any, shape: tuple[int, ...], lowest: float, highest: float
) -> NDArray[np.float64]:
    """A list of numbers, or of lists of them, as an array of this shape.

    Args:
        shape: the shape of the array; its first length may be -1, which stands for any length.
        lowest, highest: the bounds of each number, themselves allowed.
    Raises:
        ValueError: the value is something else.
    """
    import numpy as np

    _check(value, shape, lowest, highest)
    return np.array(value, dtype=np.float64).reshape(shape)


def _check(value: Any, shape: tuple[int, ...], lowest: float, highest: float) -> None:
    if not shape:
        if not is_number(value, lowest, highest):
            raise ValueError(f"not a number from {lowest} to {highest}")
        return
    if type(value) is not list or (shape[0] >= 0 and len(value) != shape[0]):
        raise ValueError(f"not a list of {shape[0]}")
    for each in value:
        _check(each, shape[1:], lowest, highest)
