"""The results file: one JSON object per line, appended when a run ends, so that none is lost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexec_cli.errors import ConfigError
from specexec_cli.guarded import parse_json
from specexec_cli.lab.bench.schema import problems

if TYPE_CHECKING:
    from specexec_cli.lab.bench.datasets import Dataset
    from specexec_cli.session import TextSession

Row = dict[str, Any]


def row_config(session: TextSession, dataset: Dataset) -> dict[str, Any]:
    """The part of a row that names models, machine and prompts.

    A model is named by its weights, since a repository may hold several GGUF files.
    """
    pair = session.pair
    return {
        "pair": pair.name,
        "target": pair.target.weights,
        "draft": pair.draft.weights if pair.draft else None,
        **session.settings,
        "dataset": dataset.name,
        "prompts_sha256": dataset.sha256,
    }


def row_key(parts: Mapping[str, Any]) -> str:
    """A key for a run, made of everything that decides it; finished runs are not repeated."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def read_results(path: Path) -> list[Row]:
    """All rows, only the last for each key; a last line that a crash has cut off is left out.

    Raises:
        ConfigError: the file cannot be read, or a line is not a result; the message names the line.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read results from {path}: {reason}") from error
    rows: dict[str, Row] = {}
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            if number == len(lines):  # without a line break: writing it was interrupted
                break
            raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
        if wrong := problems(row):
            raise ConfigError(f"{path}, line {number}: not a bench result: {wrong[0]}")
        rows[row["key"]] = row
    return list(rows.values())


class ResultsFile:
    """Appends rows to the file, and knows the keys of all its rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = {row["key"]: row for row in read_results(path)} if path.exists() else {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._mend_torn_line()
        except OSError as error:
            raise ConfigError(f"cannot write results to {path}: {error.strerror}") from error

    def _mend_torn_line(self) -> None:
        """Cuts the file after its last whole line, so that the next row begins on a new line."""
        with self.path.open("ab+") as file:
            file.seek(0)
            whole, newline, tail = file.read().rpartition(b"\n")
            if not tail.strip():
                return
            try:
                parse_json(tail)
            except ValueError:
                file.truncate(len(whole) + len(newline))
            else:
                file.write(b"\n")

    def append(self, row: Row) -> None:
        """Writes one row and flushes it to the file.

        Raises:
            ConfigError: the row cannot be written.
        """
        wrong = problems(row)
        assert not wrong, wrong
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write results to {self.path}: {error.strerror}") from error
        self.rows[row["key"]] = row
