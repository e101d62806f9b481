"""Reads JSON and TOML that anybody may have written: the result is a value or one ValueError.

All JSON and TOML that this program reads goes through here; ruff refuses json.loads elsewhere.
"""

from __future__ import annotations

import errno
import json
import stat
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MOST_BYTES = 100_000_000  # of a file; the limit of the safetensors library for headers
_PART_BYTES = 1_000_000  # of a file, read at once
_MOST_DEPTH = 100  # lists and objects in one another; printing or copying deeper ones recurses
_MOST_DIGITS = 40  # of a whole number; transformers writes 10**30 for "no limit"
_MOST_TOML_BYTES = 1_000_000  # this program's own models.toml has 80,000
# characters of a line of TOML; tomllib takes quadratic time for a key of many dots
_MOST_TOML_LINE = 4_000


def parse_json(raw: bytes | str, *, unique_names: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        raw: UTF-8 where it is bytes.
        unique_names: refuse an object that has a name twice; otherwise the last one counts.
    Raises:
        ValueError: the text is not JSON (then a JSONDecodeError), is nested too deep, or has a
            whole number of too many digits or half of a character. The message is short and names
            no file.
    """
    text = raw if isinstance(raw, str) else raw.decode("utf-8")
    try:
        value = json.loads(
            text, parse_int=_whole, object_pairs_hook=_unique if unique_names else None
        )
    except RecursionError:
        raise _too_deep() from None
    _check(value)
    if r"\ud" in text or r"\uD" in text:  # UTF-8 itself has no halves of characters
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text holds half of a character (a lone surrogate)") from None
    return value


def read_json(path: Path, *, unique_names: bool = False, most_bytes: int = MOST_BYTES) -> Any:
    """The value of a JSON file.

    Args:
        unique_names: see parse_json.
        most_bytes: the largest size that is read.
    Raises:
        OSError: the file is missing, no plain file, or cannot be read.
        ValueError: the file is larger than most_bytes, or as for parse_json.
    """
    return parse_json(_read(path, most_bytes), unique_names=unique_names)


def parse_toml(raw: bytes) -> dict[str, Any]:
    """The table of a TOML text in UTF-8.

    Raises:
        ValueError: the text is not UTF-8 (a UnicodeDecodeError), not TOML (a TOMLDecodeError),
            nested too deep, or a number or a line is too long.
    """
    text = raw.decode("utf-8")
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > _MOST_TOML_LINE:
            raise ValueError(f"line {number} has more than {_MOST_TOML_LINE} characters")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # int() refuses thousands of digits
        raise _too_long() from None
    _check(table)
    return table


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file.

    Raises:
        OSError: the file is missing, no plain file, or cannot be read.
        ValueError: the file is too large, or as for parse_toml.
    """
    return parse_toml(_read(path, _MOST_TOML_BYTES))


def _read(path: Path, most_bytes: int) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():  # reading a pipe would wait
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    raw = bytearray()
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):  # a read takes as much memory as it is allowed bytes
            raw += part
            if len(raw) > most_bytes:
                raise ValueError(f"it has more than {most_bytes} bytes")
    return bytes(raw)


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise _too_long()
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _check(value: Any) -> None:
    """Refuses a value that is nested too deep or, as TOML may, has an integer that is too long."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        inside: list[Any] = []
        for each in level:
            items: Iterable[Any] = each.values() if type(each) is dict else each
            for item in items if type(each) in (dict, list) else ():
                if type(item) in (dict, list):
                    inside.append(item)
                elif type(item) is int and abs(item) >= 10**_MOST_DIGITS:
                    raise _too_long()
        if not inside:
            return
        level = inside
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"lists or objects are nested more than {_MOST_DEPTH} deep")


def _too_long() -> ValueError:
    return ValueError(f"a whole number has more than {_MOST_DIGITS} digits")
