"""A pool of processes: one per device, so that no worker waits for another's interpreter lock.

Each worker has a pipe of its own. A shared queue would have a lock that a killed worker may
take along; a pipe only ends. Workers are spawned, so none holds another's end of a pipe: when
this process goes, in whatever way, every worker reads the end of its pipe and leaves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from specexec_cli.dsi.messages import (
    DRAFTER,
    Event,
    Ready,
    Score,
    Scored,
    WorkerLost,
    worker_name,
)
from specexec_cli.dsi.pool import WorkerPool, lost_without_answer
from specexec_cli.dsi.workers import (
    DraftServer,
    Order,
    TargetServer,
    serve_drafter,
    serve_target,
)
from specexec_cli.errors import SpecexecError, WorkerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CLOSED = -2  # no order has this epoch: everything is stale


class ProcessWorkers(WorkerPool):
    """Target servers and a drafter, each in a process of its own; see WorkerPool."""

    def __init__(
        self,
        servers: Sequence[Callable[[], TargetServer]],
        drafters: Sequence[Callable[[], DraftServer]],
        load_timeout_s: float = 600.0,
    ) -> None:
        self._context = multiprocessing.get_context("spawn")
        # one of each drafter, at least the first's: without drafts the work is said to be for it
        self._epochs = self._context.RawArray("q", max(1, len(drafters)))
        self._pipes: dict[int, Connection] = {}
        self._orders: dict[int, _Orders] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._events: deque[Event] = deque()
        self._asked = 0  # questions for logits so far
        super().__init__(servers, drafters, load_timeout_s)

    def advance_epoch(self, epoch: int, drafter: int) -> None:
        """Make work of a drafter's earlier epochs stale."""
        # one aligned word: workers see the old or the new one
        self._epochs[DRAFTER - drafter] = epoch

    def receive(self, timeout_s: float) -> Event | None:
        """The next event of a worker, its death included."""
        deadline = self.now() + timeout_s
        while not self._events:
            numbers = self._readable(deadline - self.now())
            if not numbers:
                return None
            for number in numbers:
                message = self._read(number)
                if not isinstance(message, Scored):  # those here were waited for no longer
                    self._events.append(message)
        return self._events.popleft()

    def drop(self, worker: int) -> None:
        """Kill a worker."""
        process = self._processes.pop(worker, None)
        if process is not None:
            process.kill()
            process.join()
        # now nothing reads the pipe, so an order that was stuck in it fails and its thread ends
        orders = self._orders.pop(worker, None)
        if orders is not None:
            orders.close()
        pipe = self._pipes.pop(worker, None)
        if pipe is not None:
            pipe.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ask every worker to leave, then kill those that do not; idempotent."""
        self._epochs[:] = [_CLOSED] * len(self._epochs)
        for number in list(self._pipes):
            self._send(number, None)
        deadline = time.monotonic() + timeout_s
        for number, process in list(self._processes.items()):
            process.join(max(0.0, deadline - time.monotonic()))
            self.drop(number)

    @property
    def _alive(self) -> Collection[int]:
        return self._pipes

    def _start(self, number: int, build: Callable[[], Any]) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_worker_main,
            args=(number, build, theirs, self._epochs),
            name=f"specexec-dsi-{worker_name(number).replace(' ', '-')}",
            daemon=True,
        )
        process.start()
        theirs.close()
        self._pipes[number], self._processes[number] = ours, process
        self._orders[number] = _Orders(ours)

    def _send(self, number: int, order: Order | None) -> None:
        orders = self._orders.get(number)
        if orders is not None:
            orders.put(order)

    def _ask(
        self, worker: int, order: Score, timeout_s: float
    ) -> NDArray[np.float32] | SpecexecError:
        """See WorkerPool; a worker that gives no answer in time is killed."""
        self._asked += 1
        order = replace(order, number=self._asked)
        self._send(worker, order)
        deadline = self.now() + timeout_s
        while worker in self._pipes:
            answer = None
            numbers = self._readable(deadline - self.now())
            if not numbers:
                reason = f"no answer for {timeout_s:g} s"
                self._events.append(WorkerLost(worker, reason))
                self.drop(worker)
            for number in numbers:
                message = self._read(number)
                if isinstance(message, Scored):
                    if message.number == order.number:
                        answer = message.logits
                else:
                    self._events.append(message)
            if answer is not None:
                return answer
        raise lost_without_answer(worker)

    def _readable(self, timeout_s: float) -> list[int]:
        pipes = {id(pipe): number for number, pipe in self._pipes.items()}
        # a dead worker's pipe is readable: it has ended
        ready = wait(list(self._pipes.values()), max(0.0, timeout_s))
        return [pipes[id(pipe)] for pipe in ready]

    def _read(self, number: int) -> Any:
        """One message of a worker; its loss if it is gone."""
        try:
            message = self._pipes[number].recv()
        except (EOFError, OSError):
            process = self._processes[number]
            process.join(1.0)
            message = WorkerLost(number, f"its process ended with code {process.exitcode}")
        if isinstance(message, WorkerLost):
            self.drop(number)
        return message

    def _await_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.ready) < len(self._pipes):
            numbers = self._readable(deadline - time.monotonic())
            if not numbers:
                raise WorkerError(
                    f"DSI workers were not ready within {timeout_s:g} s; "
                    "use fewer of them (`sp`) or a smaller model"
                )
            for number in numbers:
                message = self._read(number)
                if isinstance(message, WorkerLost):
                    raise WorkerError(f"DSI: {worker_name(number)} did not start: {message.reason}")
                self.ready[number] = message


class _Orders:
    """Sends one worker's orders, from a thread of its own, so that nobody waits for the worker.

    A worker reads no order while it runs a pass. A drafter in a long prefill is told of every
    restart meanwhile, and so many orders fill its pipe.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._waiting: SimpleQueue[tuple[Order | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="specexec-dsi-orders")
        self._thread.daemon = True  # main processes end without waiting for a worker that hangs
        self._thread.start()

    def put(self, order: Order | None) -> None:
        """Sends an order behind those that wait; None asks the worker to leave."""
        self._waiting.put((order,))

    def close(self) -> None:
        """Ends the thread; the worker has ended, so that no order can be stuck in its pipe."""
        self._waiting.put(None)
        self._thread.join()

    def _send_all(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            # a broken pipe means a dead worker: receive() reports it
            with contextlib.suppress(OSError):
                self._pipe.send(*waiting)


class _Mailbox:
    """A worker's end of its pipe: inbox and outbox."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def get(self) -> Any:
        """The next order; None, to leave, when the other end is gone."""
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            return None

    def put(self, event: Event | Scored | Ready) -> None:
        self._pipe.send(event)


def _worker_main(number: int, build: Callable[[], Any], pipe: Connection, epochs: Any) -> None:
    """A worker process, from loading its model to its last order."""

    def epoch(drafter: int) -> int:
        return int(epochs[DRAFTER - drafter])

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process to handle
    mailbox = _Mailbox(pipe)
    try:
        server = build()
        mailbox.put(server.ready())
        if number <= DRAFTER:
            serve_drafter(server, mailbox, mailbox, epoch)
        else:
            serve_target(server, number, mailbox, mailbox, epoch)
    except BrokenPipeError:
        return  # the main process is gone: nobody is left to tell
    except Exception as error:
        with contextlib.suppress(OSError):
            mailbox.put(WorkerLost(number, f"{type(error).__name__}: {error}"))
