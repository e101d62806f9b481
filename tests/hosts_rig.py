"""Several machines in one: workers in threads, or in processes, that join over the loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from forked import Forked
from specexec_kernels import dispatch

from specexec_cli.cli.main import main
from specexec_cli.errors import WorkerError
from specexec_cli.hosts.facts import hello_of
from specexec_cli.hosts.files import digest_of
from specexec_cli.hosts.joined import SpanOrder
from specexec_cli.hosts.pool import HostPool
from specexec_cli.hosts.wire import Wire, WireError
from specexec_cli.hosts.worker import Offer, Session, spec_of
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.hosts import (
    HostEntry,
    HostsFile,
    InWaves,
    TextRows,
    in_waves,
    plan_of_span,
)
from specexec_cli.planning.machine import Machine, Setting, Site
from specexec_cli.planning.memory import Work
from specexec_cli.planning.sizes import checkpoint_bytes
from specexec_cli.planning.tiers import SpanPlan
from specexec_cli.prefixes.folder import Bound

TOKEN = "a token of enough characters"
PLENTY = Machine(ram_bytes=4 << 30, base_bytes=0)
WORK = Work(context_tokens=256, budget=32)
_open, _opening = ModelSpec.open, threading.Lock()


def _open_alone(*args: Any, **kwargs: Any) -> StreamedModel:
    """transformers' models are built one at a time in a process; workers here are threads."""
    with _opening:
        return _open(*args, **kwargs)


def offer_of(
    checkpoint: Checkpoint,
    name: str,
    machine: Machine = PLENTY,
    kept: Bound | None = None,
    **changes: object,
) -> Offer:
    """What a worker on a machine of this memory offers."""
    rates = {"ssd": 1e9, "link": 1e9, "memory": 1e9, "vram": 0, "ram": machine.ram_bytes}
    site = Site(device="cpu", settings={each: Setting(rates[each], "given") for each in rates})
    return Offer(
        checkpoint=checkpoint,
        sizes=checkpoint_bytes(checkpoint),
        device=torch.device("cpu"),
        machine=lambda dtype: machine,
        hello=lambda: {**hello_of(name, site), **changes},
        kept=kept,
    )


def joins(pool: HostPool, offer: Offer, token: str = TOKEN) -> threading.Thread:
    """A worker in a thread, which leaves when its connection ends or it is not wanted."""

    def run() -> None:
        with suppress(WireError, WorkerError):
            connected = socket.create_connection(("127.0.0.1", pool.port))
            Session(Wire(connected, token.encode(), dialled=True), offer, lambda text: None).run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@contextmanager
def workers_at(
    port: int,
    folder: Path,
    count: int,
    kept: Sequence[Bound | None],
    notice: Callable[[str], None] = lambda text: None,
) -> Iterator[list[threading.Thread]]:
    """Workers called host-0, host-1, ... in threads, for one session that listens at a port.

    Args:
        kept: for each, how much it may keep of texts on disk.
    """
    checkpoint, over = read_checkpoint(folder), threading.Event()

    def run(offer: Offer) -> None:
        while not over.is_set():
            try:
                connected = socket.create_connection(("127.0.0.1", port))
            except OSError:
                time.sleep(0.05)
                continue
            with suppress(WireError, WorkerError):
                Session(Wire(connected, TOKEN.encode(), dialled=True), offer, notice).run()
            return

    with mock.patch.object(ModelSpec, "open", _open_alone):
        offers = [offer_of(checkpoint, f"host-{at}", kept=kept[at]) for at in range(count)]
        threads = [threading.Thread(target=run, args=(offer,), daemon=True) for offer in offers]
        for thread in threads:
            thread.start()
        try:
            yield threads
        finally:
            over.set()
            for thread in threads:
                thread.join(120)  # it writes what was to be kept
                assert not thread.is_alive()


@contextmanager
def split_model(
    folder: Path,
    starts: Sequence[int],
    *,
    dtype: str = "float32",
    machines: Sequence[Machine] = (),
    work: Work = WORK,
    planned: Work | None = None,
    planned_machine: Machine | None = None,
    wait_s: float = 20,
    notice: Callable[[str], None] = lambda text: None,
) -> Iterator[StreamedModel]:
    """A model whose layers from each of `starts` on are a worker's of their own.

    Args:
        machines: the workers'; plenty of memory where not given.
        work: how large the session is, as the workers are told.
        planned: what their memory is planned for; None: the same.
        planned_machine: what each is planned as; None: as it is.
        wait_s: for a worker to come back.
    """
    checkpoint = read_checkpoint(folder)
    sizes = checkpoint_bytes(checkpoint)
    stops = [*starts[1:], len(sizes.layers)]
    entries = tuple(HostEntry(name=f"host-{number}") for number in range(len(starts)))
    file = HostsFile(listen="127.0.0.1:0", wait_s=wait_s, hosts=entries)
    pool = HostPool(file, TOKEN.encode(), notice)
    with mock.patch.object(ModelSpec, "open", _open_alone), ExitStack() as left, closing(pool):
        each = [*machines, *[PLENTY] * (len(starts) - len(machines))]
        for entry, machine in zip(entries, each, strict=True):
            worker = joins(pool, offer_of(checkpoint, entry.name, machine))
            left.callback(worker.join, 30)  # a model that it builds is still in a test's way
        spans = [
            SpanPlan(
                host=host, layers=range(start, stop),
                plan=plan_of_span(
                    sizes, range(start, stop), planned or work, planned_machine or host.machine
                ),
            )
            for host, start, stop in zip(pool.gather(), starts, stops, strict=True)
        ]  # fmt: skip
        order = SpanOrder(
            dtype=dtype, eight_bit_rows=False, work=asdict(work), digest=digest_of(checkpoint)
        )
        pool.begin_to_open(spans, order)
        own = range(starts[0])
        plan = plan_of_span(sizes, own, work, PLENTY)
        spec = spec_of(plan, own, dtype, torch.device("cpu"), False)
        with closing(spec.open(checkpoint)) as model:
            pool.opened(dispatch.rounding(torch.device("cpu")))
            model.pass_on(pool, partial(in_waves_of_64, machines=1 + len(starts)))
            yield model


def in_waves_of_64(texts: Sequence[TextRows], machines: int = 3) -> InWaves:
    """A pass in waves of about so many rows, as if that were fastest."""
    total = sum(rows for rows, _ in texts)
    return in_waves(texts, -(-total // min(max(1, total // 64), 4 * machines)))


def _work(argv: list[str], first: str) -> None:
    """`specexec ARGV` behind the code `first`."""
    sys.argv = ["specexec", *argv]
    exec(first, {})
    main()


class WorkerProcess:
    """`specexec worker` in a process of its own.

    Args:
        before: a command that starts it; None: it is a fork, which has begun in a moment.
        first: code that it runs before.
    """

    def __init__(
        self, model: str | Path, port: int, name: str, *options: str, token: str = TOKEN,
        host: str = "127.0.0.1", before: Sequence[str] | None = None, first: str = "",
    ) -> None:  # fmt: skip
        argv = ["worker", str(model), "--join", f"{host}:{port}", "--name", name, *options]
        environment = {**os.environ, "SPECEXEC_TOKEN": token}
        self.process: Forked | subprocess.Popen[str]
        if before is None:
            self.process = Forked(_work, argv, first, environment=environment, stream=2)
            self._heard = self.process.heard
        else:
            code = f"{first}\nfrom specexec_cli.cli.main import main; main()"
            path = os.pathsep.join(sys.path)
            self.process = subprocess.Popen(
                [*before, sys.executable, "-c", code, *argv], stderr=subprocess.PIPE, text=True,
                env={**environment, "PYTHONPATH": path},
            )  # fmt: skip
            assert self.process.stderr is not None
            self._heard = self.process.stderr
        self._said = list[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._heard:
            self._said.append(line)

    def says(self, words: str) -> bool:
        """Whether a line with these words has come."""
        return any(words in line for line in self._said)

    def until_it_says(self, words: str, timeout_s: float = 60.0) -> None:
        """Waits for a line with these words."""
        until(lambda: self.says(words), timeout_s)

    def kill(self) -> None:
        """Ends it as the kernel does where memory runs out."""
        self.process.kill()
        self.process.wait()

    def ended(self, timeout_s: float = 60.0) -> tuple[int, str]:
        """Its exit code and what it said, once it has left by itself."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code, "".join(self._said)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        self._reader.join(60.0)
        self._heard.close()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def until(there: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
