"""One machine with a span of layers, as the first machine sees it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from specexec_cli.errors import WorkerError
from specexec_cli.hosts.messages import (
    ECHO_BYTES,
    MOST_TOLD,
    PROTOCOL,
    SILENCE_S,
    PassOrder,
    body_of,
    stream_of,
)
from specexec_cli.hosts.rows import SpanLog, SpanRows
from specexec_cli.hosts.wire import Part, Wire, WireError
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.spans import Elsewhere, SpanLostError
from specexec_cli.planning.tiers import SpanPlan

Frame = tuple[dict[str, Any], bytearray]
Sent = tuple[dict[str, Any], Sequence[Part]]  # a frame, whose body is in parts
Order = Callable[[], Sent | None]  # makes it; None: nobody waits for its answer any more
Then = Callable[[Frame], None]
_HASH = re.compile("[0-9a-f]{64}")


class Joined:
    """A worker that has joined: orders are answered one at a time, in a thread of their own.

    So Ctrl-C ends only the wait for an answer: what was begun is sent and received whole, and an
    answer that nobody waits for any more is dropped as it comes. Orders wait for their turn, and
    are made when it comes.

    Args:
        hello: what the worker has told of its machine.
    """

    def __init__(self, name: str, wire: Wire, hello: Mapping[str, Any]) -> None:
        self.name, self.hello = name, hello
        self.lost: str | None = None  # why it can be asked no more
        self._wire = wire
        self._orders: SimpleQueue[tuple[int, Order, Then | None, int] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[int, Frame]] = SimpleQueue()
        self._asked = self._given_up = 0  # numbers of orders
        self._giving_up = threading.Lock()
        self._thread = threading.Thread(target=self._exchange, name=f"specexec-{name}", daemon=True)
        self._thread.start()

    def begin(self, order: Order, then: Then | None = None, more: int = 0) -> None:
        """Has an order made and sent.

        Args:
            then: is given what comes back, in another thread; None: `answer` waits for it.
            more: bytes by which the answer's body may be longer than the order's.
        """
        if then is None:
            self._asked += 1
        self._orders.put((self._asked, order, then, more))

    @property
    def ended(self) -> bool:
        """Whether it was let go, so that no order is answered any more."""
        return not self._thread.is_alive()

    def answer(self) -> Frame:
        """The answer to the last order.

        Raises:
            SpanLostError: the machine is gone.
            WorkerError: it could not do what it was asked.
        """
        while True:
            try:  # in short waits, which Ctrl-C can end on every system
                number, (head, body) = self._answers.get(timeout=0.5)
            except Empty:
                if self.ended and self._answers.empty():
                    raise SpanLostError(f"{self.name} is lost: {self.lost}") from None
                continue
            if number == self._asked:
                break
        self.check(head)
        return head, body

    def check(self, head: Mapping[str, Any]) -> None:
        """Whether an answer is what was asked for.

        Raises:
            SpanLostError: the machine is gone.
            WorkerError: it could not do what it was asked.
        """
        if head["kind"] == "lost":
            raise SpanLostError(f"{self.name} is lost: {head['why']}")
        if head["kind"] == "failed":
            raise WorkerError(f"{self.name}: {head.get('why')}")

    def give_up(self) -> None:
        """Drops the answer to the last order, now or when it comes: nobody waits for it."""
        with self._giving_up:
            self._given_up = self._asked
            with suppress(Empty):
                while True:
                    self._answers.get_nowait()

    def timed(self) -> tuple[float, float]:
        """Bytes per second of the link, and seconds of a way there or back besides.

        Raises:
            SpanLostError: the machine is gone.
        """
        seconds = []
        for size in (1, 1, 1, ECHO_BYTES):
            started = time.perf_counter()
            self.begin(lambda size=size: ({"kind": "echo"}, [bytes(size)]))  # type: ignore[misc]
            self.answer()
            seconds.append(time.perf_counter() - started)
        delay_s = min(seconds[:3]) / 2
        return ECHO_BYTES / max(seconds[3] / 2 - delay_s, 1e-6), delay_s

    def replaced(self) -> None:
        """Tells the worker, if it is still there, that another one of its name has joined."""
        with suppress(WireError):
            why = f"another worker called '{self.name}' has joined: give each its own `name`"
            self._wire.send({"kind": "refused", "why": why})
        self.lost = self.lost or "its worker was started again"
        self.close()

    def close(self) -> None:
        """Lets the worker go. May be called again."""
        self.lost = self.lost or "it was let go"
        self._orders.put(None)
        self._wire.close()

    def _exchange(self) -> None:
        while (order := self._orders.get()) is not None:
            number, make, then, more = order
            answer = self._answered(make, more)
            if answer is not None:
                self._hand_on(number, answer, then)
            del order, make, then, answer  # and the rows in them

    def _hand_on(self, number: int, answer: Frame, then: Then | None) -> None:
        if then is not None:
            then(answer)
            return
        with self._giving_up:
            if number > self._given_up:
                self._answers.put((number, answer))

    def _answered(self, make: Order, more: int) -> Frame | None:
        try:
            if self.lost is not None:
                raise WireError(self.lost)
            if (frame := make()) is None:
                return None
            head, body = frame
            self._wire.send(head, *body)
            return self._next(sum(map(len, body)) + more)
        except Exception as error:  # whatever it is, whoever waits for the answer is told
            known = isinstance(error, WireError)
            self.lost = str(error) if known else f"{type(error).__name__}: {error}"
            self._wire.close()
            return {"kind": "lost", "why": self.lost}, bytearray()

    def _next(self, most_body: int) -> Frame:
        while True:
            head, body = self._wire.receive(most_body, SILENCE_S, MOST_TOLD)
            if head["kind"] != "alive":
                return head, body


@dataclass(frozen=True, slots=True)
class SpanOrder:
    """How a span is opened, besides which layers: the same for every machine."""

    dtype: str
    eight_bit_rows: bool
    work: Mapping[str, Any]  # a Work's numbers
    digest: str  # of the model's files


class ForgottenError(SpanLostError):
    """A machine has other rows of a text than the first one, which reads all texts again there."""


@dataclass(frozen=True, slots=True)
class SpanWave:
    """Rows of a pass, as one span is told of them."""

    number: int  # of the pass in the span's log
    texts: Sequence[tuple[int, PassRows]]  # by their numbers there
    tuples: bool  # whether the model's layers give tuples


class SpanPassage:
    """The way of rows to a span of layers and back; see spans.Passage.

    Args:
        planned: the machine, its layers, and the memory that it may fill.
        order: how they are opened.
    """

    def __init__(self, planned: SpanPlan, order: SpanOrder, joined: Joined) -> None:
        self.joined = joined
        self._span = planned.layers
        machine = planned.host.machine
        self.most = machine.ram_bytes, machine.vram_bytes  # RAM and VRAM that it may fill there
        # RAM and VRAM that the span takes there: as planned here, until the machine tells its own
        self.taken = planned.plan.peak_ram_bytes, planned.plan.peak_vram_bytes
        self._planned = planned.host.name, planned.plan.streams  # passes bring its weights
        self._streams = planned.plan.streams  # as the machine tells
        self._order = order
        self._beside = planned.plan.work.features or ()  # what comes back beside the rows
        # whether a head reads the rows that come back, too: those in front of the next layer
        self._reads_behind = planned.layers.stop in (order.work.get("features") or ())
        self._dtype: torch.dtype = getattr(torch, order.dtype)
        self.is_open = False  # whether the machine has opened the span, and still has it
        self.keeps = False  # whether the machine keeps rows of texts, see `keep_as`
        self.arithmetic = ""  # all that the bits of rows depend on there, besides weights
        self._kept_as: dict[str, Any] | None = None  # the order
        self.log = SpanLog()

    @property
    def span(self) -> range:
        """See spans.Passage."""
        return self._span

    @property
    def name(self) -> str:
        """Of the machine that has the span now."""
        return self.joined.name

    @property
    def as_planned(self) -> bool:
        """Whether the machine is the one that was planned for, and streams or not as planned."""
        return self._planned == (self.name, self._streams)

    def new_rows(self) -> Elsewhere:
        """See spans.Passage."""
        return SpanRows(self.log)

    def begin(self, wave: SpanWave, rows: Tensor, then: Then, wanted: Callable[[], bool]) -> None:
        """Has rows sent through the span.

        Args:
            rows: (1, rows, hidden) float32 on the CPU.
            then: is given the answer, which `read` reads.
            wanted: whether somebody waits for them still when their turn comes; if not, they stay.
        Raises:
            SpanLostError: the machine has not opened its layers.
        """
        if not self.is_open:
            raise SpanLostError(f"{self.name} has not opened its layers")

        def order() -> Sent | None:
            if not wanted():
                return None
            # what was done is taken where no Ctrl-C can come between taking and sending it
            done = self.log.take(wave.number)
            told = PassOrder(
                first=self.span.start, done=done, texts=wave.texts, tuples=wave.tuples, hidden=rows
            )
            return told.head(), body_of(rows)

        self.joined.begin(order, then, len(self._beside) * self._bytes_beside(rows.shape))

    def read(self, answer: Frame, shape: torch.Size) -> tuple[Tensor, Mapping[int, Tensor]]:
        """The rows that came back, and of the span's layers those that RowsUnderWay has beside.

        Each has memory of its own, but for those behind the span in float32: they are the rows.

        Args:
            shape: that all of them must have.
        Raises:
            ForgottenError: the machine has other rows of a text.
            SpanLostError: the machine is gone.
            WorkerError: it could not compute them.
        """
        head, body = answer
        self.joined.check(head)
        if head["kind"] == "anew":
            raise ForgottenError(f"{self.name}: {head.get('why')}")
        each = self._bytes_beside(shape)
        size = len(body) - len(self._beside) * each  # of the residual stream
        try:
            found = stream_of(head, body[: max(0, size)] if self._beside else body)
        except WireError as error:
            raise WorkerError(f"{self.name}: {error}") from error
        if found.shape != shape:
            raise WorkerError(f"{self.name} sent back other rows than it was given")
        beside = {
            number: torch.frombuffer(body[at : at + each], dtype=self._dtype).view(shape)
            for number, at in zip(self._beside, range(size, len(body), each), strict=True)
        }
        if self._reads_behind:
            beside[self.span.stop] = found.to(self._dtype)
        return found, beside

    def _bytes_beside(self, shape: torch.Size) -> int:
        """The bytes of rows of this shape that a head reads of one layer."""
        return shape.numel() * self._dtype.itemsize

    def begin_to_open(self) -> None:
        """Has the machine open the span; `opened` waits for it."""
        order, self.is_open = self._order, False
        self.log.reopened()
        head = {
            "kind": "open", "protocol": PROTOCOL,
            "span": [self.span.start, self.span.stop], "dtype": order.dtype,
            "eight_bit_rows": order.eight_bit_rows, "work": dict(order.work),
            "digest": order.digest, "ram": self.most[0], "vram": self.most[1],
        }  # fmt: skip
        self.joined.begin(lambda: (head, ()))

    def opened(self) -> str:
        """Where the span's layers wait there, once they are open.

        Raises:
            SpanLostError: the machine is gone.
            WorkerError: the span cannot be opened there, or the machine does not tell its memory or
                its arithmetic.
        """
        head, _ = self.joined.answer()
        ram, vram = head.get("ram"), head.get("vram")
        if type(ram) is not int or type(vram) is not int or min(ram, vram) < 0:
            raise WorkerError(
                f"{self.name} tells {ram!r:.40} and {vram!r:.40} as RAM and VRAM of its layers: "
                "start a worker of this version there"
            )
        arithmetic = head.get("arithmetic")
        if not isinstance(arithmetic, str) or _HASH.fullmatch(arithmetic) is None:
            raise WorkerError(
                f"{self.name} tells {arithmetic!r:.40} as what its rows' bits depend on: start a "
                "worker of this version there"
            )
        self.taken, self._streams, self.is_open = (ram, vram), bool(head.get("streams")), True
        before, self.arithmetic = self.arithmetic, arithmetic
        if self._kept_as is not None:  # rows with other bits are not those that others go on from
            self.keeps = self.keeps and self.arithmetic == before and self._begin_keeping()
        return str(head.get("label"))

    def keep_as(self, name: str, identity: str) -> bool:
        """Has the machine keep rows of texts; whether it does.

        Args:
            name: of the folder that keeps them on this machine.
            identity: see KeptTexts.
        Raises:
            WorkerError: it cannot.
        """
        self._kept_as = {
            "kind": "keep", "first": self.span.start, "name": name, "identity": identity,
        }  # fmt: skip
        try:
            self.keeps = self._begin_keeping()
        except SpanLostError:
            self.keeps = True  # as far as is known: it is asked again when it has come back
        return self.keeps

    def _begin_keeping(self) -> bool:
        head = self._kept_as
        assert head is not None
        self.joined.begin(lambda: (head, ()))
        return bool(self.joined.answer()[0].get("keeps"))

    def move(self, joined: Joined, most: tuple[int, int]) -> str:
        """Opens the span on another machine, which has it from then on.

        Where it does not come to that, also by Ctrl-C, the other machine closes what it has opened.

        Args:
            most: RAM and VRAM that the span may fill there.
        Returns:
            as `opened`.
        Raises:
            SpanLostError, WorkerError: as `opened`.
        """
        before, moved = (self.joined, self.most), False
        self.joined, self.most = joined, most
        try:
            self.begin_to_open()
            label = self.opened()
            moved = True
        finally:
            if not moved:
                first, self.is_open = self.span.start, False
                joined.begin(lambda: ({"kind": "close", "first": first}, ()))
                joined.give_up()  # nobody waits for either answer
                self.joined, self.most = before
        return label
