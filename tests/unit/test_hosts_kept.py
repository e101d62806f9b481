"""Rows that a worker keeps of its span: what it writes, what it refuses, and when it waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from specexec_cli.hosts.joined import Joined
from specexec_cli.hosts.kept_span import KeptSpan, SpanText
from specexec_cli.hosts.kept_there import KeptThere
from specexec_cli.hosts.messages import ReadOrder
from specexec_cli.hosts.rows import SpanLog
from specexec_cli.hosts.wire import WireError
from specexec_cli.hosts.worker import Session
from specexec_cli.prefixes.folder import Bound
from specexec_cli.prefixes.kept_texts import LAST_WRITES_S
from specexec_cli.prefixes.segments import BLOCK_TOKENS, Segments
from specexec_cli.prefixes.writer import Job, Writer


class Machine:
    """The way to a machine that gives one answer to every order, or none."""

    def __init__(self, name: str, answer: dict[str, Any] | None) -> None:
        self.name, self.answer, self.asked = name, answer, 0
        self.keeps = self.is_open = True
        self.ended, self.log, self.span, self.joined = False, SpanLog(), range(1, 2), self

    def begin(self, order: Callable[[], object], then: Callable[[object], None]) -> None:
        assert order() is not None
        self.asked += 1
        if self.answer is not None:
            then((self.answer, bytearray()))

    check = Joined.check


def usable(
    machines: list[Machine], names: set[str], said: list[str], no_more: bool = False
) -> set[str]:
    there = KeptThere(machines, said.append)  # type: ignore[arg-type]
    return there.usable([], names, lambda: no_more)


def test_what_all_machines_have_is_usable() -> None:
    machines = [Machine(name, {"kind": "kept", "names": ["a", name]}) for name in ("b", "c")]
    said = list[str]()
    assert usable(machines, {"a", "b", "c"}, said) == {"a"}
    assert said == []


@pytest.mark.parametrize(
    "answer",
    [{"kind": "kept", "names": told} for told in (None, "a", {"a": 1}, [1], [["a"]], ["a", None])]
    + [{"kind": "kept"}, {"kind": "failed", "why": "the order cannot be done"}],
)
def test_a_machine_that_does_not_tell_its_files_keeps_no_more_and_says_so_once(
    answer: dict[str, Any],
) -> None:
    machines, said = [Machine("attic", answer), Machine("cellar", answer)], list[str]()
    for _ in range(2):
        assert usable(machines, {"a"}, said) == set()
    assert [line.startswith("attic") for line in said] == [True]
    assert [machine.keeps for machine in machines] == [False, False]


def test_a_machine_that_is_lost_or_not_open_yet_is_asked_again() -> None:
    lost, closed = Machine("attic", {"kind": "lost", "why": "gone"}), Machine("cellar", None)
    closed.answer, closed.is_open = {"kind": "failed", "why": "no layers are open"}, False
    said = list[str]()
    assert usable([lost, closed], {"a"}, said) == set()
    assert lost.keeps
    assert closed.keeps
    assert said == []


def test_a_machine_that_does_not_answer_is_not_waited_for_once_nobody_reads() -> None:
    silent = Machine("attic", None)
    assert usable([silent], {"a"}, [], no_more=True) == set()
    assert silent.keeps


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """What a writer was told to write."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = list[Job]()
    monkeypatch.setattr(Writer, "put", lambda writer, job: found.append(job))
    return found


def kept_span() -> KeptSpan:
    return KeptSpan("toy", "an identity", (2, 0), Bound(10**9), lambda line: None)


def text_of(tokens: list[int], context_length: int = 10**6) -> SpanText:
    text = SpanText(mock.Mock(context_length=context_length))
    text.tokens, text.state.layers = tokens, []
    text.state.kept_ends.return_value = None
    return text


def test_every_token_of_a_text_is_hashed_once(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, text, hashed = kept_span(), text_of([]), list[int]()
    hash_of = Segments._hash

    def counted(segments: Segments, before: bytes, start: int, stop: int) -> bytes:
        hashed.append(stop - start)
        return hash_of(segments, before, start, stop)

    monkeypatch.setattr(Segments, "_hash", counted)
    for start in range(0, 20 * BLOCK_TOKENS, BLOCK_TOKENS):
        text.took(start, range(start, start + BLOCK_TOKENS))
        kept.put(text, start, start + BLOCK_TOKENS, end=False)
    assert sum(hashed) == len(text.tokens)
    whole = Segments("an identity")
    whole.follow(text.tokens)
    assert [job.segment for job in jobs] == whole.blocks
    assert all(job.before is jobs[0].before for job in jobs)


@pytest.mark.parametrize("end", [False, True])
def test_a_segment_that_a_text_does_not_have_is_not_written(jobs: list[Job], end: bool) -> None:
    """The text is shorter here, behind a pass that failed."""
    kept, text = kept_span(), text_of([*range(100)])
    kept.put(text, 64, 128, end=end)
    assert jobs == []
    kept.put(text, 0, 64, end=end)
    assert [(job.segment.start, job.segment.stop) for job in jobs] == [(0, 64)]


def test_no_more_tokens_are_read_than_a_text_has(jobs: list[Job]) -> None:
    order = ReadOrder(text=0, tokens=[0] * 192, segments=[(0, 192, False)])
    with pytest.raises(WireError, match="192 tokens are to be read, and a text has up to 128"):
        kept_span().read(text_of([], context_length=128), order)


@pytest.mark.parametrize("how", [WireError("the connection ended"), KeyboardInterrupt()])
def test_all_spans_together_have_some_seconds_for_writing_and_none_after_ctrl_c(
    how: BaseException,
) -> None:
    wire, waits = mock.Mock(), list[float]()
    wire.receive.side_effect = how

    def close(most_s: float) -> None:
        assert wire.close.called  # the first machine knows already
        waits.append(most_s)
        time.sleep(0.1)

    session = Session(wire, mock.Mock(), lambda line: None)
    session._spans.update({at: SimpleNamespace(close=close, most_body=0) for at in (1, 2)})
    with pytest.raises(type(how)):
        session.run()
    if isinstance(how, KeyboardInterrupt):
        assert waits == [0, 0]
    else:
        assert LAST_WRITES_S - 5 < waits[1] <= waits[0] - 0.1 <= LAST_WRITES_S
