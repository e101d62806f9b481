"""Rows of texts that machines keep of their spans, as the first machine asks for them.

What is to be written is told with the next pass, since it is of rows that earlier passes brought;
what is to be read, at once. Orders are carried out in turn, so that a crop which is noted behind
an order to read undoes it, whether it was waited for or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from specexec_cli.errors import WorkerError
from specexec_cli.hosts.joined import Frame, Sent, SpanPassage
from specexec_cli.models.spans import SpanLostError
from specexec_cli.prefixes.reading import UnreadError
from specexec_cli.prefixes.segments import Segment

_LOOK_S = 0.05  # between looks at whether somebody waits for an answer still


class KeptThere:
    """See prefixes.kept_rows.OtherKeepers.

    Args:
        passages: the ways to all spans.
        notice: told, in one line, which machine can keep no rows any more.
    """

    def __init__(self, passages: Sequence[SpanPassage], notice: Callable[[str], None]) -> None:
        self._passages, self._notice = passages, notice

    @property
    def keep_rows(self) -> bool:
        """See OtherKeepers."""
        return all(passage.keeps for passage in self._passages)

    def usable(
        self, layers: Sequence[Any], names: Collection[str], no_more: Callable[[], bool]
    ) -> set[str]:
        """See OtherKeepers."""
        found = set(names)
        told = {"kind": "kept", "names": sorted(names)}
        for each in [_Asked(passage, told) for passage in self._passages]:
            head = self._answer(each, no_more)
            found.intersection_update(() if head is None else head["names"])
        return found

    def _answer(self, asked: _Asked, no_more: Callable[[], bool]) -> Mapping[str, Any] | None:
        """The head of an answer; None if the machine is gone, or keeps no rows from now on since it
        could not do what it was asked, or nobody waits any longer."""
        try:
            return asked.answer(no_more)
        except SpanLostError:  # the next pass finds out, and waits for the machine
            return None
        except WorkerError as error:
            if asked.passage.is_open:  # if not, its layers are opened by the next pass
                if self.keep_rows:
                    self._notice(f"{error}. No machine keeps rows of texts on disk any more")
                asked.passage.keeps = False
            return None

    def begin_reading(
        self, layers: Sequence[Any], tokens: Sequence[int], segments: Sequence[Segment]
    ) -> ReadingThere:
        """See OtherKeepers."""
        told = {
            "kind": "read",
            "tokens": list(tokens),
            "segments": [[each.start, each.stop, int(each.end)] for each in segments],
        }
        return ReadingThere([
            _Asked(each, {**told, "text": layers[each.span.start].number})
            for each in self._passages
        ])  # fmt: skip

    def keep(self, layers: Sequence[Any], segment: Segment) -> None:
        """See OtherKeepers."""
        for passage in self._passages:
            layers[passage.span.start].keep(segment.start, segment.stop, int(segment.end))

    def tell(self) -> None:
        """See OtherKeepers."""
        for passage in self._passages:
            _Asked(passage, {"kind": "note", "wait_s": 0})

    def flush(self, most_s: float) -> None:
        """See OtherKeepers."""
        ends_s = time.monotonic() + most_s
        asked = [_Asked(each, {"kind": "note", "wait_s": int(most_s)}) for each in self._passages]
        for each in asked:  # what one has not written by then is computed again
            self._answer(each, lambda: time.monotonic() > ends_s)


class ReadingThere:
    """See prefixes.kept_rows.ReadingElsewhere."""

    def __init__(self, asked: Sequence[_Asked]) -> None:
        self._asked = asked

    def wait(self, no_more: Callable[[], bool]) -> None:
        """See ReadingElsewhere."""
        for each in self._asked:
            try:
                head = each.answer(no_more)
            except WorkerError:
                raise UnreadError(None) from None
            if head["kind"] != "read":
                name = head.get("name")
                raise UnreadError(name if isinstance(name, str) else None)


class _Asked:
    """An order that is on its way to a span's machine, with all that was noted before it."""

    def __init__(self, passage: SpanPassage, head: Mapping[str, Any]) -> None:
        self.passage, self._kind = passage, head["kind"]
        self._came = SimpleQueue[Frame]()
        number = passage.log.begin()

        def order() -> Sent:
            done = [list(each) for each in passage.log.take(number)]
            return {**head, "first": passage.span.start, "done": done}, ()

        passage.joined.begin(order, self._came.put)

    def answer(self, no_more: Callable[[], bool] = lambda: False) -> Mapping[str, Any]:
        """The head of the answer.

        Raises:
            SpanLostError: the machine is gone, or nobody waits any longer.
            WorkerError: it could not do it, or its answer is none.
        """
        joined = self.passage.joined
        while True:
            try:
                head, _ = self._came.get(timeout=_LOOK_S)
            except Empty:
                if no_more() or joined.ended:
                    raise SpanLostError(f"{self.passage.name} gave no answer") from None
                continue
            joined.check(head)
            names = head.get("names") if self._kind == "kept" else []
            if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
                raise WorkerError(f"{self.passage.name} tells {names!r:.40} as names of kept rows")
            return head
