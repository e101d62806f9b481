"""The values of a config.json, of which none is believed: each is what it should be, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specexec_cli.errors import ConfigError

_MOST = 1 << 31  # no size of a model is larger
# some times what any model has; each is counted, or built as a module
_MOST_LAYERS, _MOST_EXPERTS = 2_000, 10_000


def number(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """A size: the first of these keys that the config has, else the default. Where there is no
    default it is above 0.

    Raises:
        ConfigError: none of them is there and there is no default, or the value is none.
    """
    least = 1 if default is None else 0
    for key in keys:
        value = config.get(key)
        if type(value) is int and least <= value < _MOST:
            return value
        if value is not None:
            raise ConfigError(f"config.json says {_shown(value)} as '{key}', which is no size")
    if default is None:
        name = _shown(config.get("model_type"))
        raise ConfigError(f"config.json of this {name} model has no '{keys[0]}'")
    return default


def positive(config: Mapping[str, Any], *keys: str, default: int) -> int:
    """A size: the first of these keys that is above 0 in the config, else the default.

    Raises:
        ConfigError: a value is none.
    """
    return next((each for key in keys if (each := number(config, key, default=0))), default)


def check_counts(config: Mapping[str, Any]) -> None:
    """Looks at how many layers and experts a config asks for, in all its parts, before any is made.

    Raises:
        ConfigError: more than any model has.
    """
    waiting = [config]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, Mapping):
                waiting.append(value)
            most = {"layers": _MOST_LAYERS, "layer": _MOST_LAYERS, "experts": _MOST_EXPERTS}.get(
                key.rpartition("_")[2]
            )
            if most is not None and type(value) is int and value > most:
                raise ConfigError(
                    f"config.json says {_shown(value)} as '{key}', more than any model has"
                )


def values(config: Mapping[str, Any], key: str) -> list[Any]:
    """A list; an empty one where the config has none.

    Raises:
        ConfigError: the value is something else.
    """
    found = config.get(key)
    if found is not None and not isinstance(found, list):
        raise ConfigError(f"config.json says {_shown(found)} as '{key}', which is no list")
    return found or []


def part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A config within the config; an empty one where there is none.

    Raises:
        ConfigError: the value is something else.
    """
    found = config.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError(f"config.json says {_shown(found)} as '{key}', which is no object")
    return found or {}


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
