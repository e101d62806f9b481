"""The rows of a span that a worker keeps on its disk, as the first machine orders.

The first machine decides which segments of a text are written and read, for all machines alike. A
worker knows a text's tokens by the passes that brought its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from weakref import WeakKeyDictionary

from specexec_cli.hosts.messages import ReadOrder
from specexec_cli.hosts.wire import WireError
from specexec_cli.kept import file_name
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.prefixes.folder import Bound, names_in, prefixes_folder, touch
from specexec_cli.prefixes.kept_texts import LAST_WRITES_S
from specexec_cli.prefixes.reading import Reading, UnreadError
from specexec_cli.prefixes.segments import ROWS, Segment, Segments
from specexec_cli.prefixes.writer import Job, Writer


class SpanText:
    """A text's rows in a span, which are written and read as a target's; see KeptRows.

    Attributes:
        tokens: of all rows, those of draft nodes behind the committed ones.
    """

    def __init__(self, model: StreamedModel) -> None:
        self.model = model
        self.state = model.new_state()
        self.tokens: list[int] = []
        self.cuts = 0

    def took(self, prefix: int, tokens: Sequence[int]) -> None:
        """Notes the tokens of a pass's rows, which lie behind the first `prefix` slots."""
        self.tokens[prefix:] = tokens

    def commit(self, prefix: int, slots: Sequence[int]) -> None:
        """See ModelState."""
        self.state.commit(prefix, slots)
        self.tokens = [*self.tokens[:prefix], *(self.tokens[slot] for slot in slots)]

    def crop(self, length: int) -> None:
        """See ModelState."""
        if length < len(self.tokens):
            self.cuts += 1  # beforehand, for the thread that writes
        del self.tokens[self.state.crop(length) :]

    def copy(self, other: SpanText, length: int) -> None:
        """See ModelState."""
        self.cuts += 1
        self.tokens = other.tokens[: self.state.copy(other.state, length)]

    def keep_at(self, length: int) -> None:
        """See ModelState."""
        self.state.keep_at(length)


class KeptSpan:
    """Writes and reads a span's rows of texts.

    Args:
        name: see KeptTexts, and which layers these are.
        identity: see KeptTexts; the same on all machines.
        tensors: see reading.counts, of the span's layers.
        bound: what all files of this machine may take together.
        notice: told, in one line, why nothing is kept any more.
    """

    def __init__(
        self,
        name: str,
        identity: str,
        tensors: tuple[int, int],
        bound: Bound,
        notice: Callable[[str], None],
    ) -> None:
        self._folder = prefixes_folder() / file_name(name)
        self._identity, self._tensors = identity, tensors
        self._writer = Writer(self._folder, bound, notice)
        self._segments = WeakKeyDictionary[SpanText, Segments]()

    def usable(self, names: Sequence[str]) -> list[str]:
        """Which of some segments' files are there, or would have nothing of these layers."""
        rows, states = self._tensors
        there = names_in(self._folder)

        def needed(name: str) -> bool:
            return bool(rows or (states and not name.endswith(ROWS)))

        return [name for name in names if name in there or not needed(name)]

    def put(self, text: SpanText, start: int, stop: int, *, end: bool) -> None:
        """Has a segment of a text written, if the text has it: one that is shorter here, as behind
        a pass that failed, does not."""
        segments = self._segments.setdefault(text, Segments(self._identity))
        segments.follow(text.tokens)
        try:
            segment = segments.between(start, stop, end=end)
        except ValueError:
            return
        ends = text.state.kept_ends()
        if end and ends is not None and stop not in ends:
            return  # a pass that failed cost this machine an earlier state
        layers = text.state.layers
        states = [state for layer in layers for state in layer.kept_state(stop)] if end else []
        self._writer.put(Job(text, text.cuts, segment, segments.blocks, states, _missed))

    def read(self, text: SpanText, order: ReadOrder) -> str | None:
        """Reads a text's segments.

        Returns:
            None, or the name of a file that cannot be used: the text is then as before.
        Raises:
            WireError: there are no such segments, or the text has other rows than there, or no text
                of this model is as long.
            OutOfMemoryError: there is no memory for the rows.
        """
        have, most = len(text.tokens), text.model.context_length
        if len(order.tokens) > most:
            raise WireError(
                f"{len(order.tokens)} tokens are to be read, and a text has up to {most}"
            )
        segments = Segments(self._identity)
        segments.follow(order.tokens)
        try:
            found = [segments.between(start, stop, end=end) for start, stop, end in order.segments]
        except ValueError as error:
            raise WireError(str(error)) from error
        if text.tokens != list(order.tokens[:have]) or any(
            layer.get_seq_length() != have for layer in text.state.layers if layer.kept_tensors[0]
        ):
            raise WireError("a text has other rows here than on the first machine")
        if not found[0].start <= have < found[-1].stop or any(
            one.stop != other.start for one, other in pairwise(found)
        ):
            raise WireError("the segments to read do not come one behind another")
        try:
            Reading(self._folder, text, found, lambda: False).run(order.tokens)
        except UnreadError as error:
            return error.name
        touch(self._folder / each.name for each in reversed(found))
        return None

    def flush(self, most_s: float) -> None:
        """Waits until all is written, but no longer than `most_s` seconds."""
        self._writer.wait(most_s)

    def close(self, most_s: float = LAST_WRITES_S) -> None:
        """Writes what it was told to, for `most_s` seconds at most."""
        try:
            self._writer.wait(most_s)
        finally:
            self._writer.close()
            self._segments.clear()


def _missed(segment: Segment) -> None:
    """Rows that were dropped before they were written are computed again by a later session."""
