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
from specexec_cli.hosts.joined import Frame, SpanPassage
from specexec_cli.prefixes.reading import UnreadError
from specexec_cli.prefixes.segments import Segment

_LOOK_S = 0.05  # between looks at whether somebody waits for an answer still


class KeptThere:
    """See prefixes.kept_rows.OtherKeepers.

    Args:
        passages: the ways to all spans.
    """

    def __init__(self, passages: Sequence[SpanPassage]) -> None:
        self._passages = passages

    @property
    def keep_rows(self) -> bool:
        """See OtherKeepers."""
        return all(passage.keeps for passage in self._passages)

    def usable(self, layers: Sequence[Any], names: Collection[str]) -> set[str]:
        """See OtherKeepers."""
        found = set(names)
        asked = [_Asked(each, {"kind": "kept", "names": sorted(names)}) for each in self._passages]
        try:
            for each in asked:
                told = each.answer().get("names")
                found.intersection_update(told if isinstance(told, list) else [])
        except WorkerError:  # the next pass finds out, and waits for the machine
            return set()
        return found

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
        for each in asked:
            try:
                each.answer(lambda: time.monotonic() > ends_s)
            except WorkerError:  # what it has not written is computed again
                continue


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
        self._passage = passage
        self._came = SimpleQueue[Frame]()
        number = passage.log.begin()

        def order() -> tuple[dict[str, Any], bytes]:
            done = [list(each) for each in passage.log.take(number)]
            return {**head, "first": passage.span.start, "done": done}, b""

        passage.joined.begin(order, self._came.put)

    def answer(self, no_more: Callable[[], bool] = lambda: False) -> Mapping[str, Any]:
        """The head of the answer.

        Raises:
            WorkerError: the machine is gone or could not do it, or nobody waits any longer.
        """
        joined = self._passage.joined
        while True:
            try:
                head, _ = self._came.get(timeout=_LOOK_S)
            except Empty:
                if no_more() or joined.ended:
                    raise WorkerError(f"{self._passage.name} gave no answer") from None
                continue
            joined.check(head)
            return head
