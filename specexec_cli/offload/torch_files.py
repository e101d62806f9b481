"""Reading where tensors lie in a file of `torch.save`, without running what its pickle asks for.

Such a file is a zip: each tensor's bytes lie in it as they are, and a pickle says of each tensor
which bytes are its own. That pickle is read here, operation by operation, and whatever it does
besides describing tensors is refused. EAGLE's authors publish their heads so.
Source: https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Storage:
    """What tensors lie in."""

    dtype: str
    key: str


def _tensor(
    storage: object, offset: object, shape: object, strides: object, requires_grad: object,
    hooks: object, metadata: object = None,
) -> _Described:  # fmt: skip
    """In the place of torch._utils._rebuild_tensor_v2.

    Raises:
        ValueError: the numbers are not what the bytes say: negated, for one.
    """
    if not isinstance(storage, _Storage) or metadata:
        raise ValueError("it describes a tensor otherwise than torch does")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError("it describes a tensor without sizes")
    return _Described(storage.dtype, storage.key, offset, shape, strides)


def _parameter(described: object, requires_grad: object, hooks: object) -> object:
    """In the place of torch._utils._rebuild_parameter."""
    return described


def _table() -> dict[str, object]:
    """In the place of collections.OrderedDict."""
    return {}


_CALLED: dict[str, Callable[..., object]] = {
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": _parameter,
    "collections OrderedDict": _table,
}
_GIVEN = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE")  # stand in the pickle
_MADE: dict[str, Callable[[], object]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}  # fmt: skip


def _unpickled(pickled: bytes) -> object:
    """What a pickle describes, of the operations that torch.save writes and of no others.

    Python's own unpickler can be made to crash, to hang or to fill the memory by a kilobyte. Here
    nothing is hashed but strings, and tuples hold few values and are at most two deep.

    Raises:
        Exception: it is no such pickle.
    """
    stack, marks, memo = list[Any](), list[int](), dict[int, Any]()

    def taken(first: int) -> list[Any]:
        found = stack[first:]
        del stack[first:]
        return found

    given: Any
    for operation, given, _ in pickletools.genops(pickled):
        match operation.name:
            case "PROTO":
                continue
            case "STOP":
                break
            case name if name in _GIVEN:
                stack.append(given)
            case name if name in _MADE:
                stack.append(_MADE[name]())
            case "GLOBAL":
                stack.append(_named(given))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "MARK":
                marks.append(len(stack))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                stack.append(_checked(taken(-int(name[-1]))))
            case "TUPLE":
                stack.append(_checked(taken(marks.pop())))
            case "SETITEM":
                _set(stack[-3], taken(-2))
            case "SETITEMS":
                items = taken(marks.pop())
                _set(stack[-1], items)
            case "BINPUT" | "LONG_BINPUT":
                memo[given] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[given])
            case "REDUCE":
                stack.append(_call(*taken(-2)))
            case "BUILD":  # versions of modules, beside the tensors
                stack.pop()
                _set(stack[-1], [])
            case other:
                raise ValueError(f"its pickle does more than torch.save ({other})")
    return stack.pop()


def _named(name: str) -> object:
    """What stands in for what a pickle names: a storage's dtype, or what it may call.

    Raises:
        ValueError: it is none that tensors are made of.
    """
    if name.startswith("torch ") and name[6:] in _DTYPES:
        return _DTYPES[name[6:]]
    if name not in _CALLED:
        raise ValueError(f"it asks for {name.replace(' ', '.')}"[:200])
    return _CALLED[name]


def _call(called: Any, arguments: Any) -> object:
    if type(arguments) is not tuple or not any(called is each for each in _CALLED.values()):
        raise ValueError("it calls what it made itself")
    return called(*arguments)


def _storage(pid: tuple[object, ...]) -> _Storage:
    kind, dtype, key = pid[:3]
    if kind != "storage" or dtype not in ITEM_BYTES or not isinstance(key, str):
        raise ValueError("it has something besides tensors")
    return _Storage(str(dtype), key)


def _checked(values: list[object]) -> tuple[object, ...]:
    """The values as a tuple.

    Raises:
        ValueError: it would be longer or deeper than those of tensors.
    """
    inner = [each for each in values if type(each) is tuple]
    if len(values) > _MOST_DIMENSIONS or any(type(v) is tuple for each in inner for v in each):
        raise ValueError("it has longer or deeper tuples than tensors have")
    return tuple(values)


def _set(table: object, items: list[object]) -> None:
    """Sets a table's items, which are given as keys and values in turn."""
    names = items[::2]
    if type(table) is not dict or not all(type(name) is str for name in names):
        raise ValueError("it holds no table of tensors")
    table.update(zip(names, items[1::2], strict=True))


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
    if order is not None and (order.file_size != 6 or whole.read(order) != b"little"):
        raise ValueError("its numbers are not little-endian")
    if entries[pickled].file_size > _MOST_PICKLE_BYTES:
        raise ValueError(f"its pickle has {entries[pickled].file_size} bytes")
    described = _unpickled(whole.read(pickled))
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
    if not all(type(size) is int and 0 <= size <= _MOST_SIZE for size in sizes):
        raise ValueError(f"'{name:.60}' has sizes that no tensor has")
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
