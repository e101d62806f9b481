"""The machines that have joined this one: where they join, which spans they have, who is lost.

This machine alone listens, at an address that is asked for, while a session is open, and only to
who proves the token. Workers dial. Frames are JSON and numbers: nothing that comes is run.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from specexec_cli.errors import ConfigError, SpecexecError, WorkerError
from specexec_cli.hosts.facts import read_facts
from specexec_cli.hosts.joined import Joined, SpanOrder, SpanPassage, SpanWave
from specexec_cli.hosts.kept_there import KeptThere
from specexec_cli.hosts.messages import MOST_TOLD, PROTOCOL
from specexec_cli.hosts.under_way import UnderWay
from specexec_cli.hosts.wire import OtherVersionError, Wire, WireError
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.spans import RowsUnderWay, SpanLostError
from specexec_cli.planning.hosts import HostsFile, address_of, told_of_idle
from specexec_cli.planning.machine import Host
from specexec_cli.planning.tiers import SpanPlan

_HELLO_S = 60.0  # a worker that starts a GPU before it tells of it takes seconds
_STRANGERS = 8  # connections at once that have not proved the token yet

Notice = Callable[[str], None]


class HostPool:
    """Other machines with layers; see models.spans.OtherMachines.

    Args:
        file: who may join, and where.
        token: that all machines know.
        notice: told, in one line each, who is awaited, lost and back.
    Raises:
        ConfigError: this machine cannot listen at the address.
    """

    def __init__(self, file: HostsFile, token: bytes, notice: Notice) -> None:
        self._file, self._token = file, token
        # in one line, as errors are: it quotes what workers tell
        self._notice: Notice = lambda text: notice(str(SpecexecError(text)))
        self._joined: dict[str, Joined] = {}
        self._passages: list[SpanPassage] = []
        self._memory: dict[str, tuple[int, int]] = {}  # RAM and VRAM that spans may fill, by host
        self._changed = threading.Condition()
        self._strangers = threading.Semaphore(_STRANGERS)
        self._closed = self._told_of_version = False
        host, port = address_of(file.listen)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._listener = socket.create_server(found[0][4][:2], family=found[0][0])
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {file.listen} for other machines: {error.strerror or error}. "
                "Give 'listen' in the file of hosts an address of this machine"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="specexec-hosts", daemon=True).start()

    @property
    def passages(self) -> Sequence[SpanPassage]:
        """See OtherMachines."""
        return self._passages

    @property
    def as_planned(self) -> bool:
        """See OtherMachines."""
        return all(passage.as_planned for passage in self._passages)

    def send(
        self,
        parts: Sequence[PassRows],
        rows: Sequence[Sequence[Any]],
        hidden: Tensor,
        tuples: bool,
        before: RowsUnderWay | None,
    ) -> UnderWay:
        """See OtherMachines."""
        waves = [
            SpanWave(
                passage.log.begin(),
                [(each.number, part) for each, part in zip(there, parts, strict=True)],
                tuples,
            )
            for passage, there in zip(self._passages, rows, strict=True)
        ]
        assert before is None or isinstance(before, UnderWay), "it was sent by this pool"
        return UnderWay(self._passages, waves, hidden, before)

    def gather(self) -> tuple[Host, ...]:
        """Waits until every machine has joined; what to plan for, in the file's order.

        Raises:
            WorkerError: one has not joined in time.
        """
        hosts = []
        for entry in self._file.hosts:
            joined, link = self._timed(entry.name)
            facts = read_facts(joined.hello)
            host = entry.host(facts.machine, *link)
            hosts.append(replace(host, flops=facts.flops, layer_costs=facts.layers))
        self._memory = {
            host.name: (host.machine.ram_bytes, host.machine.vram_bytes) for host in hosts
        }
        return tuple(hosts)

    def _timed(self, name: str) -> tuple[Joined, tuple[float, float]]:
        """The machine of that name, and its link, also where its worker is lost meanwhile and
        joins again in time."""
        deadline = time.monotonic() + self._file.wait_s
        while True:
            joined = self._await(name, deadline)
            try:
                return joined, joined.timed()
            except SpanLostError as error:
                if time.monotonic() > deadline:
                    raise WorkerError(f"{error}, again and again: {self._mend(name)}") from error
                self._notice(f"{error}: waiting for its worker to join again")

    def begin_to_open(self, spans: Sequence[SpanPlan], order: SpanOrder) -> None:
        """Has each machine open its span; `opened` waits for them."""
        for idle in told_of_idle([entry.name for entry in self._file.hosts], spans):
            self._notice(idle)
        for each in spans:
            passage = SpanPassage(each, order, self._await(each.host.name))
            self._passages.append(passage)
            passage.begin_to_open()

    def opened(self, rounding: Sequence[str]) -> None:
        """Waits until all spans are open, also where a worker is lost meanwhile and comes back, and
        tells of machines that round otherwise.

        Args:
            rounding: how this machine rounds.
        Raises:
            WorkerError: a span cannot be opened, or its machine stays away.
        """
        for passage in self._passages:
            with suppress(SpanLostError):
                self._tell_opened(passage, passage.opened())
        self.reopen()
        for passage in self._passages:
            theirs, ours = passage.joined.hello.get("rounding"), list(rounding)
            if theirs == ours:
                continue
            self._notice(
                f"{passage.name} rounds products otherwise than this machine ({theirs}, here "
                f"{ours}): where two tokens are nearly tied, the text may be another "
                "than one machine's. It is the same from run to run"
            )

    @property
    def arithmetic(self) -> list[tuple[int, int, str]]:
        """Which layers each machine has, and all that the bits of its rows depend on."""
        return [(each.span.start, each.span.stop, each.arithmetic) for each in self._passages]

    def keep_texts(self, name: str, identity: str) -> KeptThere | None:
        """Has all machines keep rows of texts on their disks; None, and a line, if one keeps none.

        Args:
            name, identity: see KeptTexts.
        """
        if none := [each.name for each in self._passages if not each.keep_as(name, identity)]:
            self._notice(
                f"{' and '.join(none)} keeps no rows of texts on disk, so no machine does: start "
                "the worker there without `cache=False`"
            )
            return None
        return KeptThere(self._passages, self._notice)

    def _tell_opened(self, passage: SpanPassage, label: str) -> None:
        first, last = passage.span.start, passage.span.stop - 1
        self._notice(f"{passage.name} has layers {first} to {last} ({label})")

    def reopen(self) -> None:
        """See OtherMachines."""
        deadlines = dict[str, float]()  # by host: one with several spans is waited for once
        told = list[Joined]()  # that they are lost
        for passage in self._passages:
            while passage.joined.lost is not None or not passage.is_open:
                if passage.joined.lost is not None:
                    now = time.monotonic()
                    ends_s = deadlines.setdefault(passage.name, now + self._file.wait_s)
                    if passage.joined not in told:
                        told.append(passage.joined)
                        self._notice(
                            f"{passage.name} is lost ({passage.joined.lost}): waiting up to "
                            f"{max(0.0, round(ends_s - now, 1)):g} s for its worker to join again"
                        )
                    passage.is_open = False  # also where Ctrl-C comes before it is opened again
                    before = passage.joined
                    try:
                        passage.joined = self._await(passage.name, ends_s)
                    except WorkerError as error:
                        self._open_elsewhere(passage, error)
                        continue
                    self._tell_rounding(passage.joined, before, "before")
                passage.begin_to_open()
                try:
                    passage.opened()
                except SpanLostError as error:  # once more, then, while there is time
                    if time.monotonic() > deadlines.get(passage.name, math.inf):
                        self._open_elsewhere(passage, error)
                    continue
                deadlines.pop(passage.name, None)  # if it is lost again, it is waited for again
                self._notice(f"{passage.name} is back, and the text goes on")

    def _open_elsewhere(self, passage: SpanPassage, away: WorkerError) -> None:
        """Opens the span of a machine that did not come back on another one, in memory that spans
        leave free there, the one with most of it first.

        Args:
            away: what to raise where none has room: that the machine did not come back.
        """
        lost, refusals = passage.joined, list[str]()
        rooms = {name: self._left_for(passage, name) for name in self._memory}
        for name in sorted(rooms, key=lambda name: rooms[name], reverse=True):
            with self._changed:
                joined = None if self._closed else self._joined.get(name)
            if joined is None or joined.lost is not None:
                continue
            try:
                label = passage.move(joined, rooms[name])
            except WorkerError as refusal:  # or it is lost, as its own layers then find out
                refusals.append(str(refusal))
                continue
            self._tell_opened(passage, label)
            self._notice(f"{lost.name} stays away, and the text goes on with {name}")
            self._tell_rounding(joined, lost, lost.name)
            return
        why = "; ".join(refusals) or "no other one is there"
        raise WorkerError(f"{away}. Its layers have room on no other host: {why}") from away

    def _tell_rounding(self, now: Joined, lost: Joined, called: str) -> None:
        """Tells where a machine rounds otherwise than the one before it in its place.

        Args:
            called: the one before.
        """
        theirs, before = (each.hello.get("rounding") for each in (now, lost))
        if theirs != before:
            self._notice(
                f"{now.name} rounds products otherwise than {called} ({theirs}, not {before}): "
                "where two tokens are nearly tied, the text may go on with another"
            )

    def _left_for(self, moved: SpanPassage, name: str) -> tuple[int, int]:
        """RAM and VRAM of a host that all spans but the one that is moved leave free there."""
        ram, vram = self._memory[name]
        for each in self._passages:
            if each is not moved and each.name == name:
                ram, vram = ram - each.taken[0], vram - each.taken[1]
        return max(0, ram), max(0, vram)

    def close(self) -> None:
        """See OtherMachines; may be called again."""
        with self._changed:
            self._closed = True
            joined = list(self._joined.values())
            self._changed.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in joined:
            each.close()

    def _await(self, name: str, deadline: float | None = None) -> Joined:
        """The machine of that name, once it has joined.

        Args:
            deadline: of the monotonic clock, until which it is waited for; None: `wait_s` from now.
        """
        if deadline is None:
            deadline = time.monotonic() + self._file.wait_s
        told = False
        while True:
            with self._changed:
                if self._closed:
                    raise WorkerError(f"the session is over, and '{name}' is let go")
                found = self._joined.get(name)
                if found is not None and found.lost is None:
                    return found
                if found is None and not told:
                    self._notice(f"waiting for '{name}' to join: {self._mend(name)}")
                    told = True
                self._changed.wait(0.5)
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"'{name}' did not join at {self._file.listen} within {self._file.wait_s:g} s: "
                    + self._mend(name)
                )

    def _mend(self, name: str) -> str:
        """What to do so that the machine of that name joins."""
        anywhere = address_of(self._file.listen)[0] in ("0.0.0.0", "::")
        where = "ADDRESS" if anywhere else self._file.listen
        return f"run `specexec worker MODEL --join {where} --name {name}` there"

    def _accept(self) -> None:
        while not self._closed:
            try:
                connected, _ = self._listener.accept()
            except OSError:  # it was closed, or one connection failed before it was taken
                time.sleep(0.05)
                continue
            self._strangers.acquire()
            threading.Thread(target=self._welcome, args=(connected,), daemon=True).start()

    def _welcome(self, connected: socket.socket) -> None:
        try:
            wire = Wire(connected, self._token, dialled=False)
            hello, _ = wire.receive(0, _HELLO_S, MOST_TOLD)
        except WireError as error:
            if isinstance(error, OtherVersionError) and not self._told_of_version:
                self._told_of_version = True  # once, since anybody may say so
                self._notice(
                    "a worker of another version of specexec tried to join: start it with this one"
                )
            connected.close()  # whoever does not know the token is told nothing, and tells nothing
            return
        finally:
            self._strangers.release()
        name = hello.get("name")
        refusal = self._refusal(hello)
        if refusal is not None:
            with suppress(WireError):
                wire.send({"kind": "refused", "why": refusal})
            wire.close()
            return
        with self._changed:
            before = self._joined.get(str(name))
            self._joined[str(name)] = Joined(str(name), wire, hello)
            self._changed.notify_all()
        if before is not None:
            before.replaced()
        if self._closed:
            wire.close()

    def _refusal(self, hello: dict[str, object]) -> str | None:
        known = [entry.name for entry in self._file.hosts]
        if hello.get("kind") != "hello" or hello.get("name") not in known:
            called = f"no host is called '{hello.get('name')}' there, but {', '.join(known)}"
            return f"{called}: give one of these as `name`"
        if hello.get("protocol") != PROTOCOL:
            return "the worker is of another version: start a worker of this version there"
        try:
            read_facts(hello)
        except WireError as error:
            return str(error)
        return None
