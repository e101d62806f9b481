"""Reads the records of a data file: JSON or JSON lines, also gzipped, or Parquet."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from specexec_cli.errors import ConfigError
from specexec_cli.guarded import parse_json

# keys under which a JSON object may hold the list of records
_LIST_KEYS = ("data", "rows", "prompts", "examples")


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (place, record); the place is for error messages.

    Raises:
        ConfigError: the file cannot be read, or one of its lines is not JSON.
    """
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    text = _text(path)
    stripped = text.lstrip()
    names = {suffix.lower() for suffix in path.suffixes}
    if ".jsonl" in names or not _is_one_document(stripped):
        yield from _lines(path, text)
    else:
        yield from _document(path, text)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except (OSError, EOFError) as error:  # gzip.BadGzipFile is an OSError
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read the dataset {path}: {reason}") from error


def _is_one_document(text: str) -> bool:
    """Whether a file not named .jsonl holds one JSON value; a list is always taken as one."""
    if not text.startswith("{"):
        return True
    first_line, _, rest = text.partition("\n")
    try:
        parse_json(first_line)
    except ValueError:
        return True
    return not rest.strip()


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}, line {number}", parse_json(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error


def _document(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        value = parse_json(text)
    except JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if isinstance(value, dict):
        value = next(
            (value[key] for key in _LIST_KEYS if isinstance(value.get(key), list)), [value]
        )
    if not isinstance(value, list):
        raise ConfigError(f"{path}: expected a list of prompts, not {type(value).__name__}")
    for number, record in enumerate(value, start=1):
        yield f"{path}, record {number}", record


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow, which is not installed: "
            "pip install pyarrow, or convert the file to JSON lines"
        ) from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise ConfigError(f"cannot read the dataset {path}: {error}") from error
    for number, record in enumerate(rows, start=1):
        yield f"{path}, row {number}", record
