"""Reading where tensors lie in a file of `torch.save`, without running what its pickle asks for.

Such a file is a zip: each tensor's bytes lie in it as they are, and a pickle says of each tensor
which bytes are its own. Of that pickle nothing is called but what describes tensors here; whatever
else it names is refused, so torch.load's own code for it is not needed. EAGLE's authors publish
their heads so.
Source: https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from specexec_cli.errors import CheckpointError
from specexec_cli.offload.checkpoint import ITEM_BYTES, TensorRange

_MOST_PICKLE_BYTES = 16 << 20  # a head's has a few kilobytes
_MOST_DIMENSIONS, _MOST_SIZE = 64, 1 << 48
_LOCAL_HEADER_BYTES = 30  # of an entry of a zip, in front of its name
_DTYPES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor as a pickle describes it: its numbers may be anything; offset and strides are in
    items."""

    dtype: str  # safetensors' name
    key: str  # names the entry of the zip with its bytes
    offset: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]


class _Descriptions(pickle.Unpickler):
    """Makes descriptions of tensors in the place of what a file's pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands in for a name of the pickle.

        Raises:
            UnpicklingError: it is none that tensors are made of.
        """
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        found = _STAND_INS.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}"[:200])
        return found

    def persistent_load(self, pid: Any) -> Any:
        """The storage that a tensor lies in, as (dtype, name of its entry)."""
        kind, dtype, key = pid[:3]
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(key, str):
            raise pickle.UnpicklingError("it has something besides tensors")
        return dtype, key


class _StandIn:
    """What a pickle calls in the place of torch's code, and cannot change."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes what it calls")


def _tensor(
    storage: tuple[str, str], offset: Any, shape: Any, strides: Any, *more: Any
) -> _Described:
    dtype, key = storage
    return _Described(dtype, key, offset, tuple(shape), tuple(strides))


_STAND_INS = {
    ("torch._utils", "_rebuild_tensor_v2"): _StandIn(_tensor),
    ("torch._utils", "_rebuild_parameter"): _StandIn(lambda described, *more: described),
    ("collections", "OrderedDict"): _StandIn(OrderedDict),
}


def read_torch_file(path: Path) -> dict[str, TensorRange]:
    """The tensors of a file of `torch.save`, fully validated.

    Raises:
        CheckpointError: the file cannot be read, is of the form that torch wrote before 1.6, is
            damaged, or its pickle asks for more than tensors.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as whole:
            return _read(path, file, whole)
    except FileNotFoundError:
        raise CheckpointError(f"no file {path}: download the checkpoint again") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # zipfile and pickle raise what they like over damaged bytes
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise CheckpointError(
            f"{path} is no file of tensors alone as torch.save writes it since torch 1.6 "
            f"({reason}): download it again, or load it with torch and save it as safetensors"
        ) from None


def _read(path: Path, file: BinaryIO, whole: zipfile.ZipFile) -> dict[str, TensorRange]:
    """As read_torch_file, of an open file.

    Raises:
        Exception: the file is damaged.
    """
    entries = {entry.filename: entry for entry in whole.infolist()}
    [pickled] = [name for name in entries if name.rpartition("/")[2] == "data.pkl"]
    folder = pickled.removesuffix("data.pkl")
    order = entries.get(f"{folder}byteorder")
    if order is not None and whole.read(order) != b"little":
        raise ValueError("its numbers are not little-endian")
    if entries[pickled].file_size > _MOST_PICKLE_BYTES:
        raise ValueError(f"its pickle has {entries[pickled].file_size} bytes")
    described = _Descriptions(BytesIO(whole.read(pickled))).load()
    if not isinstance(described, dict):
        raise ValueError("it holds no table of tensors")
    file_bytes, places = file.seek(0, 2), {}
    for name, each in described.items():
        if not isinstance(name, str) or not isinstance(each, _Described):
            raise ValueError(f"what it holds as {name!r:.60} is no tensor")
        stored = entries.get(f"{folder}data/{each.key}")
        if stored is None or stored.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"the bytes of '{name:.60}' are not in it as they are")
        file.seek(stored.header_offset)
        header = file.read(_LOCAL_HEADER_BYTES)
        lengths = [int.from_bytes(header[at : at + 2], "little") for at in (26, 28)]
        start = stored.header_offset + _LOCAL_HEADER_BYTES + sum(lengths)
        places[name] = _placed(path, name, each, start, min(start + stored.file_size, file_bytes))
    return places


def _placed(path: Path, name: str, each: _Described, start: int, stop: int) -> TensorRange:
    """A described tensor's place.

    Args:
        start, stop: of the bytes that its storage has in the file.
    Raises:
        ValueError: it does not lie in them in one piece.
    """
    sizes = (*each.shape, each.offset)
    if len(each.shape) > _MOST_DIMENSIONS or not all(
        type(size) is int and 0 <= size <= _MOST_SIZE for size in sizes
    ):
        raise ValueError(f"'{name:.60}' has shape {each.shape!r:.60}")
    items = 1
    for size, stride in zip(reversed(each.shape), reversed(each.strides), strict=True):
        if stride != items and size > 1:
            raise ValueError(f"'{name:.60}' does not lie in one piece")
        items *= size
    item_bytes = ITEM_BYTES[each.dtype]
    first = start + each.offset * item_bytes
    last = first + prod(each.shape) * item_bytes
    if last > stop:
        raise ValueError(f"'{name:.60}' ends behind its bytes")
    return TensorRange(name, path, each.dtype, each.shape, first, last)
