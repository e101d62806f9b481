"""What was kept in a file between sessions, which may since have been damaged in any way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from specexec_cli.drafting.search import Floats

_LARGEST_BYTES = 1_000_000  # a hundred times what is ever written


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


def numbers(value: Any, shape: tuple[int, ...], lowest: float, highest: float) -> Floats:
    """A list of numbers, or of lists of them, as an array of this shape.

    Args:
        shape: -1 is any length, as the first alone.
        lowest, highest: that each number may be.
    Raises:
        ValueError: it is something else.
    """
    _check(value, shape, lowest, highest)
    return np.array(value, dtype=np.float64).reshape(shape)


def _check(value: Any, shape: tuple[int, ...], lowest: float, highest: float) -> None:
    if not shape:
        # a bool is an int to Python; NaN is between no bounds
        if type(value) not in (int, float) or not lowest <= value <= highest:
            raise ValueError(f"not a number from {lowest} to {highest}")
        return
    if type(value) is not list or (shape[0] >= 0 and len(value) != shape[0]):
        raise ValueError(f"not a list of {shape[0]}")
    for each in value:
        _check(each, shape[1:], lowest, highest)
