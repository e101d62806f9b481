"""Changes the user's own models.toml: adds a name or pair, takes one away, sets the model to use.

Lines are added or taken away and all others stay as the user wrote them, comments too. What comes
of it is parsed and compared with what was meant before the file is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specexec_cli.catalog.models_file import (
    PairEntry,
    entries_of_table,
    is_path,
    read_models_file,
)
from specexec_cli.catalog.registry import (
    Registry,
    check_pairs,
    load_registry,
    shipped_file,
    user_models_file,
)
from specexec_cli.config import DRAFT_WORDS
from specexec_cli.errors import ConfigError, UnknownModelError, nearest
from specexec_cli.guarded import parse_toml, read_toml
from specexec_cli.kept import replacing

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SECTIONS = ("models", "pairs", "heads", "names")


def lasting(word: str, registry: Registry) -> str:
    """The word as it means the same model from any folder: a path becomes absolute.

    Raises:
        ConfigError: it has characters that no file of text can hold.
    """
    if word in registry.all_names:
        return word
    if not word.isprintable():
        raise ConfigError(f"{word!a} cannot be kept: some of its characters are no text")
    path = Path(word).expanduser()
    return str(path.absolute()) if is_path(word) or path.exists() else word


def set_used(word: str | None) -> None:
    """Sets the model that commands take where none is named; None takes the setting away.

    Raises:
        ConfigError: the file cannot be read, changed or written.
    """

    def change(table: dict[str, Any]) -> None:
        table.pop("use", None)
        if word is not None:
            table["use"] = word

    def edit(lines: list[str]) -> list[str]:
        first = next((i for i, line in enumerate(lines) if line.startswith("[")), len(lines))
        kept = [line for line in lines[:first] if not re.match(r"use\s*=", line)]
        return [f"use = {_quoted(word)}"] * (word is not None) + kept + lines[first:]

    _rewrite(change, edit)


def add_name(name: str, word: str) -> None:
    """Adds another name for the model that a word stands for.

    Raises:
        ConfigError: the name cannot be one or is taken, or the file cannot be changed.
    """
    _check_free(name)

    def change(table: dict[str, Any]) -> None:
        table.setdefault("names", {})[name] = word

    def edit(lines: list[str]) -> list[str]:
        line = f"{_quoted(name)} = {_quoted(word)}"
        at = [i for i, each in enumerate(lines) if re.fullmatch(r"\[names\]\s*(#.*)?", each)]
        if not at:
            return [*lines, "", "[names]", line]
        return [*lines[: at[0] + 1], line, *lines[at[0] + 1 :]]

    _rewrite(change, edit)


def add_pair(pair: PairEntry) -> None:
    """Adds a pair with its draft and tree.

    Raises:
        ConfigError: its name cannot be one or is taken, or the file cannot be changed.
    """
    _check_free(pair.name)
    keys = ("target", "draft", "budget", "depth", "batch")
    entry = {key: getattr(pair, key) for key in keys}

    def change(table: dict[str, Any]) -> None:
        table.setdefault("pairs", {})[pair.name] = entry

    def edit(lines: list[str]) -> list[str]:
        values = [f"{key} = {_quoted(value)}" for key, value in entry.items()]
        return [*lines, "", f"[pairs.{_quoted(pair.name)}]", *values]

    _rewrite(change, edit)


def remove(name: str) -> None:
    """Takes one of the user's own entries away, whether a name, a pair or a model.

    Raises:
        UnknownModelError: the user has no such entry.
        ConfigError: another entry or `use` needs it, or the file cannot be changed.
    """
    table = _table()
    own = sorted({each for section in _SECTIONS for each in table.get(section, {})})
    if name not in own:
        if name in load_registry().all_names:
            raise ConfigError(f"'{name}' came with specexec: only your own entries can be removed")
        raise UnknownModelError(f"you have no entry '{name}'.{nearest(name, own)}")
    if table.get("use") == name:
        raise ConfigError(f"`specexec use` has set '{name}': `specexec use --none` first")
    for other, word in table.get("names", {}).items():
        if word == name:
            raise ConfigError(f"'{other}' stands for '{name}': remove '{other}' first")

    def change(table: dict[str, Any]) -> None:
        for section in _SECTIONS:
            table.get(section, {}).pop(name, None)
        for section in ("models", "pairs", "heads"):
            if table.get(section) == {}:
                del table[section]

    _rewrite(change, lambda lines: _without(lines, name))


def _without(lines: list[str], name: str) -> list[str]:
    """The lines without the tables of an entry, and without its line among the names."""
    spelled = rf"(?:{re.escape(name)}|\"{re.escape(name)}\"|'{re.escape(name)}')"
    kept, section, dropped = [], "", False
    for line in lines:
        if line.startswith("["):
            section = line
            dropped = bool(re.match(rf"\[(?:models|pairs|heads)\.{spelled}[\].]", line))
        named = section.startswith("[names]") and re.match(rf"{spelled}\s*=", line)
        if not dropped and not named:
            kept.append(line)
    return kept


def _check_free(name: str) -> None:
    """Raises: ConfigError if an entry cannot have this name."""
    if not _NAME.fullmatch(name) or name in DRAFT_WORDS:
        raise ConfigError(
            f"'{name}' cannot be a name: take up to 64 letters, digits, dots, dashes and "
            f"underscores, and none of {', '.join(DRAFT_WORDS)}"
        )
    if name in load_registry().all_names:
        raise ConfigError(
            f"there is a model '{name}' already: take another name, or remove one of your own "
            f"with `specexec models rm {name}`"
        )


def _table() -> dict[str, Any]:
    """The user's file as a table; an empty one where there is no file."""
    load_registry()  # says what is wrong with the file
    return read_toml(user_models_file()) if user_models_file().is_file() else {}


def _rewrite(
    change: Callable[[dict[str, Any]], None], edit: Callable[[list[str]], list[str]]
) -> None:
    """Replaces the user's file.

    Args:
        change: makes of the file's table the one that is wanted.
        edit: makes of the file's lines those that say so.
    """
    named = user_models_file()
    wanted, path = _table(), named.resolve()  # a link to a file elsewhere stays one
    try:
        text = path.read_text("utf-8") if path.is_file() else ""
        change(wanted)
        after = "\n".join(edit(text.rstrip("\n").split("\n"))).strip("\n") + "\n"
        if _parsed(after) != wanted:
            raise ConfigError(f"{named} is laid out so that no line could be changed: edit it")
        content = entries_of_table(wanted, named)
        shipped = read_models_file(shipped_file()).models
        check_pairs(named, content, {**shipped, **content.models})
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(after, "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {named}: {error.strerror}") from error


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return parse_toml(text.encode())
    except ValueError:
        return None


def _quoted(value: str | int | None) -> str:
    """A value as TOML writes it."""
    return json.dumps(value, ensure_ascii=False)
