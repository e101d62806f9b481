"""Thinking that models mark in ways of their own, marked as most others do: <think>...</think>.

Special tokens are not shown, and Mistral's marks of thinking ([THINK]) and of calls ([TOOL_CALLS])
are among them, as those of others may be. gpt-oss writes its replies in channels.

In OpenAI's harmony format a reply is a row of messages, each behind a header of special tokens and
words: `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`.
What stands in the channel `analysis` is thinking. Without this the words of the headers would be
left in the text.
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
    """Follows one reply token by token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.get_added_vocab()
        ids = [added.get(mark) for mark in _MARKS] if has_channels(tokenizer) else [None] * 3
        self._start: int | None
        self._channel: int | None
        self._message: int | None
        self._start, self._channel, self._message = ids  # None where there are no channels
        self._shown = {added[mark]: mark for mark in _SHOWN if mark in added}
        self._header: str | None = None  # what has come of one so far
        self._thinking = False

    def text(self, token: int, text: str) -> str:
        """What to show of a token whose text, special tokens left out, is `text`."""
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
    """A reply as the templates of such models want to be told it again: its answer alone."""
    return reply.rpartition(CLOSE)[2] if reply.startswith(OPEN) else reply


def has_channels(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer's model writes in channels."""
    return all(mark in tokenizer.get_added_vocab() for mark in _MARKS)
