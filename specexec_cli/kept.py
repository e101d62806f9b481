"""What is kept in files between sessions: JSON that may since have been damaged in any way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LARGEST_BYTES = 4_000_000  # some times what is ever written


def file_name(*parts: str) -> str:
    """The parts, such as hub ids and folders, as one name that every file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "--".join(parts)).strip("-.")


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Puts a value into the file, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=indent) + "\n")
    partial.replace(path)


def read_json(path: Path) -> Any:
    """The JSON value in the file.

    Raises:
        ValueError: it is missing, cannot be read, or is not JSON.
    """
    try:
        # a pipe would be waited for, and a file of any size read to its end
        if not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
            raise ValueError(f"{path} is missing, or no file that was written here")
        return json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def is_number(value: Any, lowest: float, highest: float) -> bool:
    """Whether it is a number between these; a bool is none, though an int to Python."""
    return type(value) in (int, float) and lowest <= value <= highest  # NaN is between no bounds


def numbers(
    value: Any, shape: tuple[int, ...], lowest: float, highest: float
) -> NDArray[np.float64]:
    """A list of numbers, or of lists of them, as an array of this shape.

    Args:
        shape: -1 is any length, as the first alone.
        lowest, highest: that each number may be.
    Raises:
        ValueError: it is something else.
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
