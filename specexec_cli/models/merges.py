"""The merges of a BPE vocabulary: those that a file lists, or those that its tokens imply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from itertools import chain
from operator import itemgetter
from typing import Protocol

Rank = tuple[float, ...]
Pairs = list[tuple[str, str]]


class Merges(Protocol):
    """The merges of a vocabulary."""

    def rank(self, index: int, left: str, right: str) -> Rank | None:
        """The place of a merge among others, the best lowest; None if there is no such merge.

        Args:
            index: the id of the token that comes of it.
        """
        ...

    def all(self) -> Pairs:
        """All of them, best first."""
        ...


class ListedMerges:
    """Those that a file lists."""

    def __init__(self, lines: Sequence[str], known: Mapping[str, int]) -> None:
        """Takes the lines: two tokens each, with a space between them, best first.

        Args:
            known: the vocabulary.
        Raises:
            ValueError: a line is not of two tokens, or no token comes of them.
        """
        self._lines = lines
        pairs = list(map(str.split, lines, " " * len(lines)))
        words = chain(chain.from_iterable(pairs), map("".join, pairs))
        if not {2}.issuperset(map(len, pairs)) or not all(map(known.__contains__, words)):
            raise ValueError("a merge is not of two tokens that make a third one")
        self._ranks = {line: place for place, line in enumerate(lines)}

    def rank(self, index: int, left: str, right: str) -> Rank | None:
        place = self._ranks.get(f"{left} {right}")
        return None if place is None else (place,)

    def all(self) -> Pairs:
        return [(left, right) for left, _, right in (line.partition(" ") for line in self._lines)]


class ImpliedMerges:
    """Those that a SentencePiece vocabulary implies: each cut of a token into two others.

    Their order is transformers', whose own search takes ten times as long for 262,144 tokens.
    """

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float] | None) -> None:
        """Takes a vocabulary, from 0 in order.

        Args:
            scores: one for each token, the best highest; None where a token's place is its rank.
        Raises:
            ValueError: a token has no score, or one that is no number.
        """
        self._ids = ids
        self._ranks = range(0, -len(ids), -1) if scores is None else scores
        if len(self._ranks) != len(ids) or any(map(math.isnan, self._ranks)):
            raise ValueError("a token has no score, or one that is no number")

    def rank(self, index: int, left: str, right: str) -> Rank | None:
        return -self._ranks[index], -len(left), -len(right), index

    def all(self) -> Pairs:
        known, ranks = self._ids, self._ranks
        cuts = _cuts(set(map(len, known)) - {0})
        found = [
            (ranks[index], cut, len(token) - cut, (token[:cut], token[cut:]))
            for token, index in known.items()
            for cut in cuts.get(len(token), ())
            if token[:cut] in known and token[cut:] in known
        ]
        found.sort(key=itemgetter(0, 1, 2), reverse=True)
        return [pair for _, _, _, pair in found]


def _cuts(lengths: Set[int]) -> dict[int, list[int]]:
    """Where tokens of each length can be cut into two of such lengths, the last place first.

    All places of one very long token would take as long as a million tokens.
    """
    return {
        length: [cut for cut in sorted(lengths, reverse=True) if length - cut in lengths]
        for length in lengths
    }
