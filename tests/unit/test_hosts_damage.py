"""Whatever comes in the place of an order, an answer or a greeting is one line, and no text has
other rows for it afterwards."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import random_tokens, random_tree
from gguf_toys import TOYS, save_toy
from hosts_rig import PLENTY, WORK, offer_of

from specexec_cli.errors import WorkerError
from specexec_cli.guarded import parse_json
from specexec_cli.hosts import worker
from specexec_cli.hosts.facts import read_facts
from specexec_cli.hosts.files import digest_of
from specexec_cli.hosts.joined import (
    ForgottenError,
    Joined,
    SpanOrder,
    SpanPassage,
    SpanWave,
)
from specexec_cli.hosts.kept_there import KeptThere
from specexec_cli.hosts.messages import ECHO_BYTES
from specexec_cli.hosts.pool import HostPool
from specexec_cli.hosts.rows import SpanRows
from specexec_cli.hosts.under_way import UnderWay
from specexec_cli.hosts.wire import WireError
from specexec_cli.hosts.worker import Session
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.hosts import HostEntry, HostsFile, plan_of_span
from specexec_cli.planning.machine import Host
from specexec_cli.planning.sizes import checkpoint_bytes
from specexec_cli.planning.tiers import SpanPlan
from specexec_cli.prefixes.folder import Bound
from specexec_cli.prefixes.reading import UnreadError
from specexec_cli.prefixes.segments import BLOCK_TOKENS, Segments
from specexec_cli.verify.masks import verification_rows

Head = dict[str, Any]
Frame = tuple[Head, bytearray]
PREFIX = BLOCK_TOKENS + 2  # rows of the text
OTHER = 7_000_001  # the number of another text, which no damage to a number makes of the first's
OTHER_PREFIX = 9
# how often something is damaged, whether layers give tuples, and which rows a trained head reads of
# the span: one kind keeps recurrent states, another has embeddings for positions
KINDS = {
    "llama": (40, False, (2, 3, 4)), "falcon_h1": (6, True, None), "gpt2": (12, False, None),
}  # fmt: skip
ANSWERS = {
    "anew", "closed", "echo", "failed", "keeps", "kept", "noted", "read", "ready", "rows", "unread",
}  # fmt: skip
_JUNK = (
    None, True, -1, 0, 1, 5, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63), 10**30, 0.5, 1e300,
    float("inf"), float("nan"), "", "x", "ff", "../../x", "\x1b[2J", [], [0], [[]], {}, {"a": 1},
    [None], ["forget"], ["commit", 0, -1], [0] * 70,
)  # fmt: skip


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything within a value of JSON."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for at, each in inside:
        yield (*way, at)
        if isinstance(each, dict | list):
            yield from places(each, (*way, at))


def damaged(head: Head, draw: random.Random) -> Head | None:
    """A head with one place or two that are other than they were; None if it could not come."""
    found = copy.deepcopy(head)
    for _ in range(draw.choice((1, 1, 2))):
        *way, last = draw.choice([*places(found)])
        holder: Any = found
        for step in way:
            holder = holder[step]
        old, how = holder[last], draw.randrange(5)
        if how == 0:
            del holder[last]
        elif how == 1 and isinstance(holder, list):
            holder.insert(last, draw.choice(holder))
        elif how == 2 and type(old) is int:
            holder[last] = draw.choice((old - 1, old + 1, -old, 2 * old, old << 20))
        elif how == 3 and isinstance(old, str | list):
            holder[last] = old[: draw.randrange(len(old) + 1)]
        else:
            holder[last] = copy.deepcopy(draw.choice(_JUNK))
        if not found:
            return None
    try:
        found = parse_json(json.dumps(found))
    except ValueError:
        return None
    return found if isinstance(found.get("kind"), str) else None


def damaged_frame(frame: Frame, draw: random.Random) -> Frame:
    """A frame that differs in its head, or in the length of its body."""
    head, body = frame
    if len(body) and not draw.randrange(6):
        return head, body[: draw.randrange(len(body))] + bytes(draw.choice((0, 0, 4, 128)))
    while (other := damaged(head, draw)) is None:
        pass
    return other, body


class ToWorker:
    """The wire to a worker that answers at once, in this thread of the first machine's."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.asked = list[Frame]()
        self.spoil: Callable[[Frame], Frame] = lambda frame: frame
        self.left = 0  # bytes by which the last answer's body could have been longer
        self._answers = list[Frame]()

    def send(self, head: Head, *body: Any) -> None:
        frame = parse_json(json.dumps(head)), bytearray(b"".join(body))
        self.asked.append((copy.deepcopy(frame[0]), frame[1][:]))
        answer, rows = self._session._answer(*frame)
        self._answers.append(
            self.spoil((parse_json(json.dumps(answer)), bytearray(b"".join(rows))))
        )

    def receive(self, most_body: int, *most: float) -> Frame:
        if not self._answers:
            raise WireError("nothing came")
        head, body = self._answers.pop()
        self.left = most_body - len(body)
        if self.left < 0:
            raise WireError("a longer frame came than is expected")
        return head, body

    def close(self) -> None:
        """Nothing is open."""


class Rig:
    """A worker with the last layers of a toy, its way to the first machine, and one text."""

    def __init__(self, name: str, folder: Path) -> None:
        folder.mkdir()
        self.draws, self.tuples, features = KINDS[name]
        work = replace(WORK, features=features)
        save_toy(TOYS[name], folder)
        self.said = list[str]()
        checkpoint = read_checkpoint(folder)
        sizes = checkpoint_bytes(checkpoint)
        self.width = sizes.hidden
        offer = offer_of(checkpoint, "attic", kept=Bound(10**9))
        self.session = Session(SimpleNamespace(), offer, self.said.append)  # type: ignore[arg-type]
        self.wire = ToWorker(self.session)
        span = range(1, len(sizes.layers))
        planned = SpanPlan(
            host=Host(name="attic", machine=PLENTY, link_bytes_per_s=1e9, delay_s=0.0), layers=span,
            plan=plan_of_span(sizes, span, work, PLENTY),
        )  # fmt: skip
        order = SpanOrder(
            dtype="float32", eight_bit_rows=False, work=asdict(work), digest=digest_of(checkpoint)
        )
        self.joined = self._join()
        self.passage = SpanPassage(planned, order, self.joined)
        self.there = KeptThere([self.passage], self.said.append)
        self.layers: list[Any] = [None, self.passage.new_rows()]
        self.tokens = random_tokens(PREFIX)
        segments = Segments("an identity")
        segments.follow(self.tokens)
        self.segments = [segments.between(0, BLOCK_TOKENS, end=True)]
        generator = torch.Generator().manual_seed(1)
        self.rows_in = torch.randn(1, PREFIX + 9, self.width, generator=generator)
        self.tree = random_tree(8, 1)
        self.other = self.passage.new_rows()
        assert isinstance(self.other, SpanRows)
        self.other.number = OTHER

    def _join(self) -> Joined:
        return Joined("attic", self.wire, {})  # type: ignore[arg-type]

    def fresh(self) -> None:
        """As a worker that has joined, with its layers open and no text."""
        if self.joined.lost is not None:
            self.passage.joined = self.joined = self._join()
        for first in [*self.session._spans]:
            self.session._close_span(first)
        self.open()
        self.keep()

    def open(self) -> None:
        self.passage.begin_to_open()
        self.passage.opened()

    def keep(self) -> None:
        assert self.passage.keep_as("toy", "an identity")

    def read_text(self) -> torch.Tensor:
        """The rows of the text's tokens behind the span, with nothing known of any text before."""
        rows = self.layers[1]
        assert isinstance(rows, SpanRows)
        self.passage.log.forget()
        rows.length, rows._of = 0, self.passage.log.opened
        rows.keep_at(BLOCK_TOKENS)
        return self.passed(PassRows.chain(self.tokens, 0), self.rows_in[:, :PREFIX])

    def verify(self) -> torch.Tensor:
        """The rows of a token and a tree behind the text, of which a part is kept on disk."""
        rows = self.layers[1]
        rows.commit(PREFIX, torch.arange(0))
        rows.keep(0, BLOCK_TOKENS, 1)
        told = verification_rows([3], self.tree, PREFIX)
        return self.passed(told, self.rows_in[:, PREFIX:])

    def passed(self, told: PassRows, hidden: torch.Tensor) -> torch.Tensor:
        return self._passed(self.layers[1].number, told, hidden)

    def read_other(self) -> None:
        """Has the span read another text, beside the first."""
        self.other.length, self.other._of = 0, self.passage.log.opened
        told = PassRows.chain(self.tokens[::-1][:OTHER_PREFIX], 0)
        self._passed(OTHER, told, self.rows_in[:, :OTHER_PREFIX])
        self.other.commit(OTHER_PREFIX, torch.arange(0))

    def other_text(self) -> torch.Tensor:
        """The rows of a token and a tree behind the other text."""
        self.other.crop(OTHER_PREFIX)
        told = verification_rows([3], self.tree, OTHER_PREFIX)
        return self._passed(OTHER, told, self.rows_in[:, PREFIX:])

    def _passed(self, number: int, told: PassRows, hidden: torch.Tensor) -> torch.Tensor:
        wave = SpanWave(self.passage.log.begin(), [(number, told)], self.tuples)
        way = UnderWay([self.passage], [wave], hidden)
        try:
            way.wait(0)
            return torch.cat([way.rows(), *way.beside().values()])
        finally:
            way.give_up()

    def usable(self) -> None:
        self.there.usable(self.layers, [each.name for each in self.segments], lambda: False)

    def read(self) -> None:
        self.layers[1].crop(0)
        self.there.begin_reading(self.layers, self.tokens[:BLOCK_TOKENS], self.segments).wait(
            lambda: False
        )

    def note(self) -> None:
        self.there.flush(1)

    def timed(self) -> None:
        self.joined.timed()

    def close(self) -> None:
        self.joined.close()
        for first in [*self.session._spans]:
            self.session._close_span(first)


@pytest.fixture(params=KINDS)
def rig(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = Rig(request.param, tmp_path / "model")
    found.fresh()
    yield found
    found.close()


def orders_of(rig: Rig) -> tuple[list[Frame], torch.Tensor, torch.Tensor]:
    """One order of every kind, as the first machine sends them, and the rows of the text and of the
    tree."""
    rig.open()
    rig.keep()
    text, tree = rig.read_text(), rig.verify()
    rig.note()
    rig.usable()
    with suppress(UnreadError):  # a state may be kept at other lengths
        rig.read()
    rig.joined.begin(lambda: ({"kind": "echo"}, [b"1234"]))
    rig.joined.answer()
    orders = {head["kind"]: (head, body) for head, body in rig.wire.asked}
    orders["close"] = {"kind": "close", "first": 1}, bytearray()
    kinds = ["close", "echo", "keep", "kept", "note", "open", "pass", "read"]
    assert sorted(orders) == kinds
    return [orders[kind] for kind in [*kinds, *["pass"] * 8, *["read"] * 3]], text, tree


def test_a_damaged_order_is_one_line_and_changes_no_other_row(rig: Rig) -> None:
    orders, text, tree = orders_of(rig)
    rig.fresh()
    rig.read_other()
    other, whole = rig.other_text(), list[bool]()
    for seed in range(2 * rig.draws):
        draw = random.Random(seed)
        assert torch.equal(rig.read_text(), text), seed
        rig.read_other()
        order = draw.choice(orders)
        head, body = damaged_frame(order, draw)
        answer, _ = rig.session._answer(copy.deepcopy(head), body)
        assert answer["kind"] in ANSWERS, (seed, head)
        if order[0]["kind"] in ("open", "close") or [*rig.session._spans] != [1]:
            rig.fresh()
            continue
        try:
            assert torch.equal(rig.other_text(), other), (seed, head)
            whole.append(True)
        except ForgottenError:  # all texts are read again
            whole.append(False)
        if not seed % 8:
            rig.read_text()
            assert torch.equal(rig.verify(), tree), (seed, head)
    assert 0 < sum(whole) < len(whole)
    assert all(line.isprintable() and len(line) < 2000 for line in rig.said)


def test_a_damaged_answer_is_one_line_and_changes_no_other_row(rig: Rig) -> None:
    _, text, tree = orders_of(rig)
    done: Sequence[Callable[[], object]] = (
        rig.open, rig.keep, rig.verify, rig.verify, rig.usable, rig.read, rig.note, rig.timed,
    )  # fmt: skip
    for seed in range(rig.draws):
        draw = random.Random(seed)
        if rig.joined.lost is not None or not (rig.passage.is_open and rig.passage.keeps):
            rig.fresh()
        assert torch.equal(rig.read_text(), text), seed
        what = draw.choice(done)
        whole = list[bool]()  # whether the rows came as they were sent

        def spoil(frame: Frame, draw: random.Random = draw, whole: list[bool] = whole) -> Frame:
            other = damaged_frame(frame, draw)
            whole.append(other[1] == frame[1])
            return other

        rig.wire.spoil = spoil
        try:
            found = what()
        except (WorkerError, UnreadError):  # the former is one line, the latter is never shown
            found = None
        except AssertionError:
            assert what == rig.keep, seed  # it is said that no rows are kept
            found = None
        rig.wire.spoil = lambda frame: frame
        if what == rig.verify and found is not None:
            assert isinstance(found, torch.Tensor)
            assert found.shape == tree.shape, seed
            assert torch.equal(found, tree) or not all(whole), seed


def test_an_answer_to_a_pass_is_as_long_as_it_may_be(rig: Rig) -> None:
    rows = rig.read_text()
    assert rows.shape[0] == (4 if rig.session._spans[1].model.context._wanted else 1)
    assert rig.wire.left == 0


@pytest.mark.parametrize("rig", ["llama"], indirect=True)
def test_memory_that_runs_out_before_rows_are_sent_back_is_one_line(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = rig.read_text()

    def runs_out(hidden: torch.Tensor, beside: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(worker, "body_of", runs_out)
        with pytest.raises(WorkerError, match=r"^attic: RAM is too small: .* pass of 9 rows"):
            rig.verify()
    assert torch.equal(rig.read_text(), text)


@pytest.mark.parametrize("rig", ["llama"], indirect=True)
def test_a_text_may_become_longer_than_memory_was_planned_for(rig: Rig) -> None:
    span = rig.session._spans[1]
    longest = span.model.context_length
    assert longest > WORK.context_tokens
    row = 4 * rig.width
    assert span.most_body // row >= longest + (1 << 14), "and trees larger than was planned"
    assert rig.session._most_body == max(span.most_body, ECHO_BYTES)


def hello(rig: Rig) -> Head:
    found = parse_json(json.dumps(rig.session._offer.hello()))
    flops = {"float32": [[1, 1e9], [64, 1e11]]}
    layer = dict.fromkeys(("layer_s", "row_s", "slot_s"), 1e-6)
    return {**found, "arithmetic": {"flops": flops, "layers": {"float32": layer}}}


@pytest.mark.parametrize("rig", ["llama"], indirect=True)
def test_a_damaged_greeting_is_one_line(rig: Rig) -> None:
    file = HostsFile(listen="127.0.0.1:0", wait_s=1, hosts=(HostEntry(name="attic"),))
    pool, whole = SimpleNamespace(_file=file), hello(rig)
    assert HostPool._refusal(pool, whole) is None  # type: ignore[arg-type]
    refused = 0
    for seed in range(400):
        head = damaged(whole, random.Random(seed))
        if head is None:
            continue
        refusal = HostPool._refusal(pool, head)  # type: ignore[arg-type]
        if refusal is None:  # what the planner then makes of it
            file.hosts[0].host(read_facts(head).machine, 1e9, 0.0)
        else:
            assert refusal
            refused += 1
    assert refused > 100
