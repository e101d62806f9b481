"""Cuts a text into segments, each with the name of the file that keeps its rows.

A segment is BLOCK_TOKENS tokens behind a multiple of as many. Its key is a hash of the model and of
all tokens up to its end, so that texts that begin alike share files, and a longer text adds files
to those of a shorter one. Where layers keep a state that no token can be taken out of, that state
is kept at a few lengths only, each in the file of an end: a segment of up to BLOCK_TOKENS tokens,
with its rows and the state behind them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from specexec_cli.core import common_prefix

BLOCK_TOKENS = 64  # files of 2 to 32 MB for most models; fewer tokens than that are computed anew
ROWS, END = ".rows", ".end"  # how names of files end


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens from `start` to `stop` of a text."""

    start: int
    stop: int
    before: bytes  # the hash of the model and of all tokens up to `start`
    key: bytes  # the hash of the model and of all tokens up to `stop`
    end: bool = False  # whether the state behind the last token is kept as well

    @property
    def name(self) -> str:
        """The name of the segment's file."""
        ending = END if self.end else ROWS
        return f"{_short(self.before)}-{self.stop - self.start}-{_short(self.key)}{ending}"


def _short(key: bytes) -> str:
    return key.hex()[:32]


class Segments:
    """The segments of a text that grows.

    Args:
        identity: of the model and its arithmetic.
    Attributes:
        blocks: every whole segment, in order. A new list takes the place of this one where the text
            changes, so that whoever has the old one may go on reading it.
    """

    def __init__(self, identity: str) -> None:
        self._first = hashlib.sha256(identity.encode()).digest()
        self._tokens: list[int] = []
        self.blocks: list[Segment] = []

    def follow(self, tokens: Sequence[int]) -> int:
        """Makes this the segments of another text; returns the whole segments that have stayed."""
        stayed = min(common_prefix(self._tokens, tokens) // BLOCK_TOKENS, len(self.blocks))
        if stayed < len(self.blocks):
            self.blocks = self.blocks[:stayed]
        self._tokens = list(tokens)
        self._cut()
        return stayed

    def _cut(self) -> None:
        for start in range(len(self.blocks) * BLOCK_TOKENS, len(self._tokens), BLOCK_TOKENS):
            stop = start + BLOCK_TOKENS
            if stop <= len(self._tokens):
                before = self._hash_at(start)
                self.blocks.append(Segment(start, stop, before, self._hash(before, start, stop)))

    def _hash_at(self, start: int) -> bytes:
        block = start // BLOCK_TOKENS
        return self.blocks[block - 1].key if block else self._first

    def _hash(self, before: bytes, start: int, stop: int) -> bytes:
        return hashlib.sha256(before + array("q", self._tokens[start:stop]).tobytes()).digest()

    def end(self, length: int) -> Segment:
        """The segment that ends where the text has `length` tokens, at least 1."""
        start = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        before = self._hash_at(start)
        return Segment(start, length, before, self._hash(before, start, length), end=True)

    def between(self, start: int, stop: int, *, end: bool) -> Segment:
        """The segment of these tokens.

        Raises:
            ValueError: the text has none there.
        """
        if end:
            found = self.end(stop) if 0 < stop <= len(self._tokens) else None
        else:
            block = start // BLOCK_TOKENS
            found = self.blocks[block] if 0 <= block < len(self.blocks) else None
        if found is None or (found.start, found.stop) != (start, stop):
            raise ValueError(f"{start} to {stop} are no segment of {len(self._tokens)} tokens")
        return found

    def ends_among(self, names: Collection[str]) -> Iterator[Segment]:
        """The ends of this text that have a file, the longest first.

        Args:
            names: of all files of this model.
        """
        counts: dict[str, set[int]] = {}  # of tokens in ends, by the hash of the text before
        for name in names:
            before, tokens, key = [*name.split("-"), "", ""][:3]
            if key.endswith(END) and tokens.isdecimal():
                counts.setdefault(before, set()).add(int(tokens))
        for start in range(len(self.blocks) * BLOCK_TOKENS, -1, -BLOCK_TOKENS):
            for count in sorted(counts.get(_short(self._hash_at(start)), ()), reverse=True):
                if 0 < count <= min(BLOCK_TOKENS, len(self._tokens) - start):
                    found = self.end(start + count)
                    if found.name in names:
                        yield found
