"""The settings that /set can change while a chat runs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from specexec_cli.config import GenerationConfig, Method, SamplingConfig, TreeConfig
from specexec_cli.errors import ConfigError, nearest

# key -> (the part of ChatSettings it lives in, its name there, how its text is read)
_KEYS: dict[str, tuple[str, str, Any]] = {
    **{each.name: ("sampling", each.name, type(each.default)) for each in fields(SamplingConfig)},
    "max_tokens": ("generation", "max_tokens", int),
    "budget": ("tree", "budget", int),
    "depth": ("tree", "max_depth", int),
    "batch": ("tree", "batch", int),
}
_SWITCHES = {
    "thinking": "show the thinking part of replies",
    "show_drafts": "paint which tokens came from the draft model",
    "markdown": "render Markdown",
}
KEYS = (*_KEYS, "stop", *_SWITCHES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """How replies are made and shown."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    tree: TreeConfig = field(default_factory=TreeConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    method: Method | None = None  # None: the session's own, with drafts if it has a draft model
    thinking: bool = True
    show_drafts: bool = False
    markdown: bool = True

    def with_value(self, key: str, value: str) -> ChatSettings:
        """The settings with one of them changed to a value that is given as text.

        Raises:
            ConfigError: there is no such key, or it cannot take the value.
        """
        if key in _SWITCHES:
            switched: ChatSettings = _replaced(self, {key: on_or_off(key, value)})
            return switched
        if key == "stop":
            texts = (value.replace("\\n", "\n"),) if value else ()
            return replace(self, generation=replace(self.generation, stop=texts))
        if key not in _KEYS:
            raise ConfigError(
                f"there is no setting '{key}'.{nearest(key, list(KEYS))} /set lists them"
            )
        part, name, read = _KEYS[key]
        changes = {name: _number(key, value, read)}
        if key == "budget":  # a depth that no longer fits is lowered
            changes["max_depth"] = max(1, min(self.tree.max_depth, int(changes[name])))
        changed: ChatSettings = _replaced(self, {part: _replaced(getattr(self, part), changes)})
        return changed

    def described(self) -> list[tuple[str, str]]:
        """Every key with its value."""
        rows = [(key, str(getattr(getattr(self, p), name))) for key, (p, name, _) in _KEYS.items()]
        rows.append(("stop", " ".join(repr(text) for text in self.generation.stop) or "(none)"))
        return rows + [(key, "on" if getattr(self, key) else "off") for key in _SWITCHES]


def _replaced(settings: Any, changes: dict[str, Any]) -> Any:
    """dataclasses.replace with names that are known at run time only."""
    return replace(settings, **changes)


def on_or_off(name: str, value: str) -> bool:
    """Whether a setting that is a switch was set on or off.

    Raises:
        ConfigError: the value is neither on nor off.
    """
    words = {"on": True, "true": True, "yes": True, "1": True, "show": True,
             "off": False, "false": False, "no": False, "0": False, "hide": False}  # fmt: skip
    if value.lower() not in words:
        raise ConfigError(f"{name} is on or off, not '{value}'")
    return words[value.lower()]


def _number(key: str, value: str, read: type[int] | type[float]) -> int | float:
    try:
        return read(value)
    except ValueError:
        kind = "a whole number" if read is int else "a number"
        raise ConfigError(f"{key} takes {kind}, not '{value}'") from None
