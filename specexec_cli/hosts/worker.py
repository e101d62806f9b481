"""A worker: joins the machine where a session is open, and runs the span of layers it is given.

A worker keeps its model's files, and no session: when the connection ends, its span is closed and
it tries to join again, until somebody ends it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from specexec_cli.config import DTYPE_BYTES
from specexec_cli.errors import (
    CheckpointError,
    ConfigError,
    SpecexecError,
    WorkerError,
    clear_shortage,
)
from specexec_cli.hosts.files import digest_of
from specexec_cli.hosts.messages import (
    ALIVE_S,
    ECHO_BYTES,
    PROTOCOL,
    PassOrder,
    ReadOrder,
    body_of,
    done_of,
)
from specexec_cli.hosts.open_span import OpenSpan, OtherRowsError
from specexec_cli.hosts.wire import Part, Wire, WireError
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.resident_parts import SharedParts
from specexec_cli.models.spans import NoHead, NoTable
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.planning.hosts import plan_of_span
from specexec_cli.planning.machine import Machine
from specexec_cli.planning.memory import Work
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.planning.tiers import Plan
from specexec_cli.prefixes.arithmetic import arithmetic_of
from specexec_cli.prefixes.folder import Bound
from specexec_cli.prefixes.kept_texts import LAST_WRITES_S

_DIAL_S = 1.0  # between tries to join
_CONNECT_S = 5.0
_MOST_NODES = 1 << 14  # of a tree, whatever was planned
_MOST_ROWS = 1 << 24  # of a session, in whichever sense: as of the longest text
_MOST_WAIT_S = 60  # for rows to be written, with somebody waiting
_REFUSALS = 3  # one after another, after which the token counts as another

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a worker has: a model's files, and a device."""

    checkpoint: Checkpoint
    sizes: ModelBytes
    device: torch.device
    machine: Callable[[str], Machine]  # as it is now, for a dtype
    hello: Callable[[], Mapping[str, Any]]
    kept: Bound | None = None  # for rows of texts on its disk; None keeps none


class Session:
    """One connection, from joining to its end."""

    def __init__(self, wire: Wire, offer: Offer, notice: Notice) -> None:
        self._wire, self._offer = wire, offer
        # in one line, as errors are: it quotes what orders say
        self._notice: Notice = lambda text: notice(str(SpecexecError(text)))
        self._spans: dict[int, OpenSpan] = {}  # by their first layer

    def run(self) -> None:
        """Carries out orders.

        Raises:
            WireError: the connection ended.
            WorkerError: the first machine does not want this worker.
        """
        try:
            self._wire.send(self._offer.hello())
            while True:
                head, body = self._wire.receive(self._most_body)
                if head["kind"] == "refused":
                    raise WorkerError(f"not joined: {head.get('why')}")
                with self._alive():
                    answer, rows = self._answer(head, body)
                self._wire.send(answer, *rows)
                del head, body, answer, rows  # before the next order is waited for
        except Exception:  # whatever ended it, the first machine may wait for this one
            self._end(LAST_WRITES_S)
            raise
        finally:
            self._end(0)  # at Ctrl-C somebody waits here

    @property
    def _most_body(self) -> int:
        """Bytes that an order's body may have."""
        return max([ECHO_BYTES, *(span.most_body for span in self._spans.values())])

    def _end(self, most_s: float) -> None:
        """Closes the connection and all spans, which have `most_s` seconds together for writing; a
        session that ends has waited for that as well."""
        self._wire.close()
        ends_s = time.monotonic() + most_s
        for first in [*self._spans]:
            self._close_span(first, max(0.0, ends_s - time.monotonic()))

    def _answer(
        self, head: dict[str, Any], body: bytearray
    ) -> tuple[dict[str, Any], Sequence[Part]]:
        kind = head["kind"]
        try:
            if kind == "echo":
                return {"kind": "echo"}, [body]
            if kind == "open":
                plan = self._open(head)
                peaks = {"ram": plan.peak_ram_bytes, "vram": plan.peak_vram_bytes}
                told = {"label": plan.label, "streams": plan.streams, **peaks}
                told["arithmetic"] = arithmetic_of(self._offer.device)
                return {"kind": "ready", **told}, ()
            if kind == "close" and type(head.get("first")) is int:
                self._close_span(head["first"])
                return {"kind": "closed"}, ()
            if kind == "pass" and self._spans:
                span = self._span_of(head.get("first"))
                with span.or_unknown():
                    order = PassOrder.read(head, body)
                return self._passed(span, order)
            if kind in ("keep", "kept", "read", "note") and self._spans:
                return self._kept(head, self._span_of(head.get("first"))), ()
            raise WireError(f"an order '{kind}' cannot be carried out")
        except (SpecexecError, WireError) as error:
            self._notice(str(error))
            return {"kind": "failed", "why": str(error)}, ()

    def _span_of(self, first: object) -> OpenSpan:
        found = self._spans.get(first) if type(first) is int else None
        if found is None:
            raise WireError(f"no layers from {first} on are open here")
        return found

    def _kept(self, head: Mapping[str, Any], span: OpenSpan) -> dict[str, Any]:
        """Carries out an order about rows on this machine's disk; returns the answer."""
        kind, bound = head["kind"], self._offer.kept
        if kind == "keep":
            name, identity = head.get("name"), head.get("identity")
            if not isinstance(name, str) or not isinstance(identity, str):
                raise WireError("what is to be kept has no name")
            keeps = bound is not None and span.keep_as(name, identity, bound, self._notice)
            return {"kind": "keeps", "keeps": keeps}
        with span.or_unknown():
            done = done_of(head)
        span.do(done)
        if span.kept is None:
            raise WireError("no rows are kept here")
        if kind == "kept":
            names = head.get("names")
            if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
                raise WireError("the names of kept rows cannot be read")
            return {"kind": "kept", "names": span.kept.usable(names)}
        if kind == "read":
            order = ReadOrder.read(head)
            unread = span.kept.read(span.text(order.text), order)
            return {"kind": "read"} if unread is None else {"kind": "unread", "name": unread}
        most_s = head.get("wait_s")
        if type(most_s) is not int or not 0 <= most_s <= _MOST_WAIT_S:
            raise WireError("how long to wait cannot be read")
        span.kept.flush(most_s)
        return {"kind": "noted"}

    def _passed(self, span: OpenSpan, order: PassOrder) -> tuple[dict[str, Any], Sequence[Part]]:
        try:
            hidden = span.run(order)
        except OtherRowsError as error:
            self._notice(str(error))
            return {"kind": "anew", "why": str(error)}, ()
        beside = span.model.context.taken()
        with clear_shortage(f"it ran out behind a pass of {hidden.shape[1]} rows"):
            return {"kind": "rows", "shape": list(hidden.shape)}, body_of(hidden, beside)

    def _open(self, head: Mapping[str, Any]) -> Plan:
        """Opens the span that is asked for; returns where its layers wait."""
        offer = self._offer
        if head.get("protocol") != PROTOCOL:
            raise WorkerError(
                "the session is of another version of specexec than this worker: start a worker of "
                "the session's version here"
            )
        if head.get("digest") != digest_of(offer.checkpoint):
            raise CheckpointError(
                f"{offer.checkpoint.folder} here is another model, or another version of it, than "
                "on the first machine: start the worker with the same one (specexec pull)"
            )
        span, work, dtype = _asked(head, len(offer.sizes.layers))
        self._close_span(span.start)  # whose memory is free again, then
        plan = plan_of_span(offer.sizes, span, work, _within(offer.machine(dtype), head))
        spec = spec_of(plan, span, dtype, offer.device, bool(head.get("eight_bit_rows")))
        hidden = offer.sizes.hidden
        stands_in = SharedParts(ends=(NoTable(hidden), NoHead()))
        model = spec.open(offer.checkpoint, shared=stands_in, notice=self._notice)
        # a text may become longer than memory was planned for, and then comes in one pass; trees
        # too, where a chat sets another budget
        longest = max(work.context_tokens, min(model.context_length, _MOST_ROWS))
        largest = max(work.budget, _MOST_NODES)
        rows = replace(work, context_tokens=longest, budget=largest).pass_rows
        self._spans[span.start] = OpenSpan(model, span, rows, plan.work.features or ())
        self._notice(f"layers {span.start} to {span.stop - 1} are open ({plan.label})")
        return plan

    def _close_span(self, first: int, most_s: float = LAST_WRITES_S) -> None:
        span = self._spans.pop(first, None)
        if span is not None:
            span.close(most_s)

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Sends signs of life from another thread while the block runs."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(ALIVE_S):
                with suppress(WireError):
                    self._wire.send({"kind": "alive"})

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def spec_of(
    plan: Plan, span: range, dtype: str, device: torch.device, eight_bit_rows: bool
) -> ModelSpec:
    """How a span is opened, as its plan says."""
    return ModelSpec(
        device=device,
        dtype=getattr(torch, dtype),
        tiers=plan.tiers,
        span=span,
        buffers=max(2, plan.ssd_buffers),
        device_buffers=max(2, plan.device_buffers),
        eight_bit_rows=eight_bit_rows,
        eight_bit_kv=plan.work.eight_bit_kv,
        kv_layers=tuple(span.start + layer for layer in plan.kv_layers),
    )


def _within(machine: Machine, head: Mapping[str, Any]) -> Machine:
    """The machine with no more memory than an order to open allows.

    Raises:
        ConfigError: it allows no memory of a GPU that computes.
        WireError: the order cannot be read.
    """
    ram, vram = head.get("ram"), head.get("vram")
    if not isinstance(ram, int) or not isinstance(vram, int) or min(ram, vram) < 0:
        raise WireError("the memory of the span cannot be read")
    if machine.vram_bytes and not vram:
        raise ConfigError("'vram_gb' is 0, and a GPU computes here: start it with `device='cpu'`")
    return replace(
        machine,
        ram_bytes=min(machine.ram_bytes, ram),
        vram_bytes=min(machine.vram_bytes, vram),
    )


def _asked(head: Mapping[str, Any], layers: int) -> tuple[range, Work, str]:
    """The span, the size of the session and the dtype of an order to open.

    Raises:
        WireError: the order cannot be read.
    """
    span, told, dtype = head.get("span"), head.get("work"), head.get("dtype")
    if (
        not isinstance(span, list) or [type(each) for each in span] != [int, int]
        or not 0 < span[0] < span[1] <= layers
        or not isinstance(dtype, str) or dtype not in DTYPE_BYTES
    ):  # fmt: skip
        raise WireError(f"layers {span} in {dtype} are none of the {layers} here")
    kinds = {field.name: type(field.default) for field in fields(Work)}
    features = told.get("features") if isinstance(told, dict) else None
    if features is not None and not (
        isinstance(features, list | tuple) and set(map(type, features)) <= {int}
        and 1 <= len(features) == len(set(features)) <= layers
    ):  # fmt: skip
        raise WireError("which rows a head reads cannot be read")
    told = {**told, "features": None} if isinstance(told, dict) else told
    if not isinstance(told, dict) or {name: type(told[name]) for name in told} != kinds:
        raise WireError("the size of the session cannot be read")
    for name, value in told.items():
        if isinstance(value, int) and not 0 <= value <= _MOST_ROWS:
            raise WireError(f"'{name}' of the session is not between 0 and {_MOST_ROWS}")
    work = Work(**{**told, "features": features and tuple(features)})
    return range(*span), work, dtype


def work_for(address: tuple[str, int], token: bytes, offer: Offer, notice: Notice) -> None:
    """Joins the machine at an address again and again, and works for it; never returns.

    Raises:
        WorkerError: the machine does not want this worker, or has another token.
    """
    told, refused = False, 0
    while True:
        try:
            connected = socket.create_connection(address, timeout=_CONNECT_S)
        except OSError as error:
            if not told:
                where = f"{address[0]}:{address[1]}"
                notice(f"no session is open at {where} ({error.strerror or error}): waiting")
                told = True
            time.sleep(_DIAL_S)
            continue
        told = False
        try:
            wire = Wire(connected, token, dialled=True)
        except WireError as error:
            # a session that ends at this moment looks like one with another token
            refused += 1
            if refused == _REFUSALS:
                raise WorkerError(f"{address[0]}:{address[1]}: {error}") from error
            time.sleep(_DIAL_S)
            continue
        refused = 0
        notice("joined")
        try:
            Session(wire, offer, notice).run()
        except WireError as error:
            notice(f"the session is over: {error}")
        time.sleep(_DIAL_S)
