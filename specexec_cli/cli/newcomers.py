"""What a wrong command line was meant to be, as people write it who come from other programs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

_MODEL_FLAGS = ("-m", "--model")
_PICTURES = "Pictures are not read: models run on text alone."
_ADAPTERS = "LoRA adapters are not applied: merge one into its model (peft: merge_and_unload)."
_REFUSED = {
    "--image": _PICTURES, "--images": _PICTURES, "--mmproj": _PICTURES,
    "--lora": _ADAPTERS, "--adapter": _ADAPTERS,
    "--mcp": "There is no MCP: programs that use the server call tools themselves (docs/serve.md).",
}  # fmt: skip


def meant_command(error: Any, words: Sequence[str]) -> str:
    """The command that was meant, as a sentence with a space before it; empty if none is known.

    Args:
        error: typer's, of a command line that it refuses.
        words: the command line behind `specexec`.
    """
    context = error.ctx
    if context is None:
        return ""
    names: list[str] = []
    while context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    told, option = error.format_message(), getattr(error, "option_name", None)
    if option in _REFUSED:
        return f" {_REFUSED[option]}"
    if option in _MODEL_FLAGS:
        takes_word = any(one.param_type_name == "argument" for one in error.ctx.command.params)
        return _told([*names, _value(words)]) if takes_word else ""
    if unknown := re.match(r"No such command '(.*?)'", told):
        return _of_command(unknown[1], words, context.command)
    if names in (["generate"], ["chat"]) and "unexpected extra argument" in told:
        return " A prompt for a model: specexec generate -m MODEL PROMPT."
    return ""


def _of_command(word: str, words: Sequence[str], root: Any) -> str:
    """What ollama calls `run`, or a command of a group such as `models`, named without it."""
    rest = list(words[words.index(word) + 1 :]) if word in words else []
    if word == "run":
        named = [_value([each]) if each.startswith("--model=") else each for each in rest]
        plain = [each for each in named if not each.startswith("-")] or ["MODEL"]
        chat = len(plain) == 1
        return _told(["chat", *plain] if chat else ["generate", "-m", *plain])
    for name, group in getattr(root, "commands", {}).items():
        for known in (word, {"ls": "list"}.get(word)):
            if known in getattr(group, "commands", {}):
                return _told([name, known, *rest])
    return ""


def _value(words: Sequence[str]) -> str:
    """The value of -m or --model among the words."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in _MODEL_FLAGS:
            return value if equals else next(iter(words[at + 1 :]), "MODEL")
    return "MODEL"


def _told(words: Sequence[str | None]) -> str:
    return f" Did you mean: specexec {shlex.join(map(str, words))}"
