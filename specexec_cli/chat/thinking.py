"""Tells a reasoning model's thinking from its answer while the text streams."""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Part:
    """A run of text that is all thinking or all answer."""

    text: str
    thinking: bool
    drafted: bool = False


class ThinkSplitter:
    """Splits text at <think> and </think>, which may arrive in pieces; the tags are dropped."""

    def __init__(self, prompt: str = "") -> None:
        # some templates open the thinking part themselves, at the end of the prompt
        self.thinking = prompt.rstrip().endswith(OPEN)
        self._held = ""  # may turn out to be the beginning of a tag
        self._fresh = self.thinking  # nothing but line breaks since the last tag

    def push(self, text: str, drafted: bool = False) -> list[Part]:
        """Takes the next text; returns the parts that can be shown now."""
        text, self._held = self._held + text, ""
        parts: list[Part] = []
        while text:
            tag = CLOSE if self.thinking else OPEN
            before, found, text = text.partition(tag)
            if not found:
                held = _overlap(before, tag)
                before, self._held = before[: len(before) - held], before[len(before) - held :]
            self._add(parts, before, drafted)
            if found:
                self.thinking, self._fresh = not self.thinking, True
        return parts

    def finish(self) -> list[Part]:
        """The text that is still held when the reply has ended."""
        parts: list[Part] = []
        self._add(parts, self._held, False)
        self._held = ""
        return parts

    def _add(self, parts: list[Part], text: str, drafted: bool) -> None:
        if self._fresh:  # the line breaks around a tag belong to the tag
            text = text.lstrip("\n")
        if text:
            self._fresh = False
            parts.append(Part(text, self.thinking, drafted))


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
