"""A session's view of kept prefixes: brings rows back before a text begins, and keeps new ones.

A prefix ends in front of a file that is damaged or gone. Where other machines have layers, each
keeps the rows of its own: a segment is there if all have its file, and it is they who are told what
to write and to read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event
from weakref import WeakKeyDictionary

from torch import Tensor

from specexec_cli.models.layer_state import ModelState
from specexec_cli.prefixes.folder import Bound, names_in, prefixes_folder, touch
from specexec_cli.prefixes.kept_rows import KeptRows, OtherKeepers
from specexec_cli.prefixes.reading import Reading, UnreadError, counts
from specexec_cli.prefixes.segments import BLOCK_TOKENS, Segment, Segments
from specexec_cli.prefixes.writer import Job, Used, Writer

LAST_WRITES_S = 10.0  # the longest that the end of a session waits for what is still to be written


class _Text:
    """What is known of the text that a target holds: its segments, and which were offered."""

    def __init__(self, identity: str) -> None:
        self.segments = Segments(identity)
        self.cuts = -1  # the target's, when the text was last looked at
        self.offered = 0  # whole segments that are on disk, or are to be
        self.ends: list[int] = []  # lengths whose states are
        self.number = 0  # of the texts that have begun, where only what several have is kept

    def follow(self, tokens: Sequence[int]) -> None:
        """Goes over to a text that may differ."""
        self.offered = min(self.offered, self.segments.follow(tokens))
        self.ends = [end for end in self.ends if end <= self.offered * BLOCK_TOKENS]

    def missed(self, segment: Segment) -> None:
        """Notes that a segment is not on disk; called by the thread that writes."""
        if segment.end:
            with suppress(ValueError):
                self.ends.remove(segment.stop)
        else:
            self.offered = min(self.offered, segment.start // BLOCK_TOKENS)


class KeptTexts:
    """Keeps the rows of texts of one model in a folder, and brings them back.

    Args:
        name: of the folder: readable, and another one for other weights and other arithmetic.
        identity: of all that a row's bits depend on, besides the tokens up to it.
        bound: what the files of all models may take together.
        notice: told, in one line, why nothing is kept any more.
        others: machines that keep the rows of their layers; None if all layers are here.
    """

    def __init__(
        self,
        name: str,
        identity: str,
        bound: Bound,
        notice: Callable[[str], None],
        others: OtherKeepers | None = None,
    ) -> None:
        self._others = others
        self._folder = prefixes_folder() / name
        self._identity = identity
        self._writer = Writer(self._folder, bound, notice)
        self._texts = WeakKeyDictionary[KeptRows, _Text]()
        self._begun = 0  # texts so far
        self.read_no_more = Event()  # ends `bring_back` in another thread, which brings nothing
        self._first: dict[str, int] | None = None  # the text that first had a segment, by its name

    def keep_beginnings_alone(self) -> None:
        """Keeps from now on only what two texts of this session have in common."""
        self._first = {}

    def _text_of(self, target: KeptRows) -> _Text | None:
        """What is known of the target's text; None if its layers cannot be brought back, or other
        machines keep none any more."""
        if any(layer.kept_tensors is None for layer in target.state.layers):
            return None
        if self._others is not None and not self._others.keep_rows:
            return None
        return self._texts.setdefault(target, _Text(self._identity))

    def bring_back(
        self,
        target: KeptRows,
        prompt: Sequence[int],
        no_more: Callable[[], bool] = lambda: False,
    ) -> None:
        """Gives a target the rows of a prompt's beginning that are on disk, where it has fewer.

        Args:
            target: holds a proper prefix of the prompt, or nothing.
            prompt: its last token's row is never brought back: the next token follows from it.
            no_more: polled before each file, by several threads; once it is true, nothing is
                brought back.
        Raises:
            OutOfMemoryError: there is no memory for the rows.
        """

        def ended() -> bool:
            return self.read_no_more.is_set() or no_more()

        most, have = len(prompt) - 1, len(target.tokens)
        text = self._text_of(target)
        if text is not None and self._first is not None:
            self._begun += 1
            text.number, text.offered, text.ends = self._begun, 0, []
        if text is None or most - have < BLOCK_TOKENS:
            return
        text.follow(prompt[:most])
        text.cuts = target.cuts
        names = names_in(self._folder)
        usable = self._usable(text.segments, target.state, names, ended)
        while found := _longest(text.segments, target.state, len(target.tokens), usable):
            try:
                self._read(target, found, prompt, ended)
            except UnreadError as error:
                if ended():
                    return
                usable -= usable if error.name is None else {error.name}
                continue
            stop = found[-1].stop
            text.offered = max(text.offered, stop // BLOCK_TOKENS)
            if found[-1].end:
                text.ends.append(stop)
            touch(self._folder / each.name for each in reversed(found))
            break
        # where this text parts from those on disk, whose states may all lie elsewhere
        names &= usable
        missing = (each.start for each in text.segments.blocks if each.name not in names)
        target.keep_at(next(missing, most))

    def _usable(
        self, segments: Segments, state: ModelState, names: set[str], ended: Callable[[], bool]
    ) -> set[str]:
        """The names of a text's segments whose files are on disk, on every machine that has any.

        Args:
            names: of all files of this model here.
        """
        usable = set(names)
        if not counts(state.layers)[0]:  # these layers have files of ends alone
            usable.update(each.name for each in segments.blocks)
        if self._others is not None:
            own = {each.name for each in (*segments.blocks, *segments.ends_among(names))} & usable
            usable = self._others.usable(state.layers, own, ended) if own else own
        return usable

    def _read(
        self,
        target: KeptRows,
        found: Sequence[Segment],
        prompt: Sequence[int],
        ended: Callable[[], bool],
    ) -> None:
        """Reads segments, here and on other machines at once.

        Raises:
            UnreadError: a file cannot be used; the text is as before, but begins anew if a state
                was replaced on some machines and not on all.
            OutOfMemoryError: there is no memory for the rows.
        """
        reading = Reading(self._folder, target, found, ended)
        if self._others is None:
            reading.run(prompt)
            return
        have = len(target.tokens)
        target.crop(have)  # also on machines that have been opened anew
        there = self._others.begin_reading(target.state.layers, prompt[: found[-1].stop], found)
        try:
            reading.run(prompt)
            there.wait(ended)
        except BaseException:
            target.crop(0 if counts(target.state.layers)[1] else have)
            raise

    def offer(self, target: KeptRows, *, length: int | None = None, ended: bool = False) -> None:
        """Has new segments of a target's text written, in the background.

        Args:
            length: tokens of the text, where those behind them are only supposed to follow.
            ended: whether the text has ended, so that its last state is worth keeping.
        """
        text = None if self._writer.gave_up else self._text_of(target)
        if text is None:
            return
        tokens = target.tokens[:length]
        whole = len(tokens) // BLOCK_TOKENS
        news = ended or whole > text.offered or target.state.kept_ends() is not None
        if text.cuts == target.cuts and not news:
            return
        text.follow(tokens)
        text.cuts = target.cuts
        first, text.offered = text.offered, max(text.offered, whole)
        for segment in text.segments.blocks[first:whole]:
            self._put(target, text, segment, ())
        for length in _worthwhile(target, len(tokens), text.ends, ended):
            states = [state for layer in target.state.layers for state in layer.kept_state(length)]
            text.ends.append(length)
            self._put(target, text, text.segments.end(length), states)
        if ended:
            self._writer.put(Used(text.segments.blocks[:whole]))
            if self._others is not None:
                self._others.tell()

    def _put(
        self, target: KeptRows, text: _Text, segment: Segment, states: Sequence[Tensor]
    ) -> None:
        first = self._first
        if first is not None and first.setdefault(segment.name, text.number) == text.number:
            return
        before = text.segments.blocks
        self._writer.put(Job(target, target.cuts, segment, before, states, text.missed))
        if self._others is not None:
            self._others.keep(target.state.layers, segment)

    def flush(self, most_s: float = LAST_WRITES_S) -> None:
        """Waits until what was offered is on disk, but no longer than `most_s` seconds."""
        ends_s = time.monotonic() + most_s
        if self._others is not None:
            self._others.flush(most_s)
        self._writer.wait(max(0.0, ends_s - time.monotonic()))

    def close(self, most_s: float = LAST_WRITES_S, last_s: float | None = None) -> None:
        """Writes what was offered, for `most_s` seconds at most, and ends the thread.

        Idempotent.

        Args:
            last_s: see Writer.close, of the segment that is being written by then.
        """
        self.flush(most_s)
        self._writer.close(last_s)
        self._texts.clear()


def _worthwhile(target: KeptRows, now: int, known: Sequence[int], ended: bool) -> list[int]:
    """The lengths up to `now` whose states are to be kept: each spares a segment's tokens at
    least."""
    lengths = target.state.kept_ends()
    if lengths is None:
        return []
    found = list[int]()
    for length in sorted(lengths):
        if length > now or (length == now and not ended):
            continue
        if not any(0 <= length - other < BLOCK_TOKENS for other in (0, *known, *found)):
            found.append(length)
    return found


def _longest(segments: Segments, state: ModelState, have: int, names: set[str]) -> list[Segment]:
    """The segments on disk that bring a text the farthest beyond `have` tokens; none if none do."""
    first = have // BLOCK_TOKENS
    whole = list[Segment]()
    for segment in segments.blocks[first:]:
        if segment.name not in names:
            break
        whole.append(segment)
    if not counts(state.layers)[1]:
        return whole
    for end in segments.ends_among(names):
        if end.stop <= have:
            break
        if end.start <= (first + len(whole)) * BLOCK_TOKENS:
            return [*(each for each in whole if each.stop <= end.start), end]
    return []
