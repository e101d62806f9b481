"""From tokens to text that may be shown: whole characters only, nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from specexec_cli.models.channels import Channels

_UNFINISHED = "\ufffd"  # what decoders put for bytes that are not (yet) a character


class TextStream:
    """Decodes one generation's tokens as they come.

    A token alone may be half a character, and SentencePiece drops a leading space at the start of
    a text, so each decode starts a few tokens back and only the difference counts. Text that ends
    in a replacement character waits, however long: later bytes may change all of its tail. A byte
    that is a character by itself (Llama-2's line break) does not wait, although decoders replace it
    too if broken bytes follow it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stop: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._channels = Channels(tokenizer)
        self._stop = tuple(stop)
        self._tokens = list(prompt[-8:])
        self._prefix = 0  # where decoding starts
        self._read = len(self._tokens)  # tokens whose text has been taken
        self._held = ""  # may turn out to be the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """Takes one token; returns the text it releases. `stopped` tells of a stop string."""
        self._tokens.append(token)
        new, unfinished = self._unread()
        if unfinished:
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        return self._release(self._channels.text(token, new))

    def finish(self) -> str:
        """Everything still held back, once no more tokens come."""
        if self.stopped:
            return ""
        new, _ = self._unread()
        self._read = len(self._tokens)
        rest = self._release(new)
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        return rest

    def _unread(self) -> tuple[str, bool]:
        """The text of the tokens whose text has not been taken, and whether more may change it."""
        before = self._decode(self._prefix, self._read)
        now = self._decode(self._prefix, len(self._tokens))
        # not simply len(before): a prompt may end inside a character that these tokens complete
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
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
