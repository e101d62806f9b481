"""Turns tokens into text to show: only whole characters, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from specexec_cli.models.channels import Channels

_UNFINISHED = "\ufffd"  # decoders write this for bytes that are not, or not yet, a character


class TextStream:
    """Decodes the tokens of one reply as they come.

    A single token may be half a character, and SentencePiece drops a leading space at the start of
    a text. So each decode starts some tokens back, and only the difference to the last decode is
    new text. Text that ends in a replacement character waits, however long: later bytes may change
    all of its end. A byte that is a character by itself (Llama-2's line break) does not wait,
    although decoders replace it too if broken bytes follow it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stop: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._channels = Channels(tokenizer)
        self._stop = tuple(stop)
        self._tokens = list(prompt[-8:])
        self._prefix = 0  # the token at which decoding starts
        self._read = len(self._tokens)  # number of tokens with text already returned
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """Takes one token; returns the text to show now. Sets `stopped` at a stop string."""
        self._tokens.append(token)
        new, unfinished = self._unread()
        if unfinished:
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        return self._release(self._channels.text(token, new))

    def finish(self) -> str:
        """The text that was held back; to be called after the last token."""
        if self.stopped:
            return ""
        new, _ = self._unread()
        self._read = len(self._tokens)
        rest = self._release(new)
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        return rest

    def _unread(self) -> tuple[str, bool]:
        """The text of the tokens after `_read`, and whether later tokens may change it."""
        before = self._decode(self._prefix, self._read)
        now = self._decode(self._prefix, len(self._tokens))
        # len(before) would be wrong if these tokens complete a character that the prompt began
        same = next(
            (at for at, (old, new) in enumerate(zip(before, now, strict=False)) if old != new),
            min(len(before), len(now)),
        )
        return now[same:], now.endswith(_UNFINISHED)

    def _decode(self, start: int, stop: int) -> str:
        text = self._tokenizer.decode(
            self._tokens[start:stop], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
