"""Rewrites models' various marks of thinking as the usual <think>...</think>.

Some models mark thinking ([THINK]) or tool calls ([TOOL_CALLS]) by special tokens, which are not
shown as text. This module shows those marks.

gpt-oss writes its replies in OpenAI's harmony format: a series of messages, each behind a header of
special tokens and words, such as
`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`. The text
of the channel `analysis` is thinking. This module drops the words of the headers, which would
otherwise be left in the text.
Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"
_MARKS = ("<|start|>", "<|channel|>", "<|message|>")
_THINKING = {
    "<think>": OPEN, "[THINK]": OPEN, "<seed:think>": OPEN,
    "</think>": CLOSE, "[/THINK]": CLOSE, "</seed:think>": CLOSE,
}  # fmt: skip
_SHOWN = {**_THINKING, **{mark: mark for mark in ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")}}


class Channels:
    """Follows one reply token by token, and says which text to show for each token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.get_added_vocab()
        ids = [added.get(mark) for mark in _MARKS] if has_channels(tokenizer) else [None] * 3
        self._start: int | None
        self._channel: int | None
        self._message: int | None
        self._start, self._channel, self._message = ids  # None where there are no channels
        self._shown = {added[mark]: mark for mark in _SHOWN if mark in added}
        self._header: str | None = None  # the words of an unfinished header; None outside headers
        self._thinking = False

    def text(self, token: int, text: str) -> str:
        """The text to show for a token; `text` is the token decoded without special tokens."""
        if (mark := self._shown.get(token)) is not None:
            return text.replace(mark, "") + _SHOWN[mark]
        if token in (self._start, self._channel):
            self._header = ""
            return text
        if token == self._message and self._header is not None:
            before, self._thinking = self._thinking, self._header.strip().startswith("analysis")
            self._header = None
            if before == self._thinking:
                return ""
            return OPEN if self._thinking else CLOSE
        if self._header is None:
            return text
        self._header += text
        return ""


def without_thinking(reply: str) -> str:
    """A reply without its thinking, as chat templates expect earlier replies."""
    return reply.rpartition(CLOSE)[2] if reply.startswith(OPEN) else reply


def has_channels(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's model writes in channels of the harmony format."""
    return all(mark in tokenizer.get_added_vocab() for mark in _MARKS)
