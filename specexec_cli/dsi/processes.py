"""A pool of workers in processes of this machine.

Processes, not threads, so that no worker waits for another's interpreter lock. Each worker has a
pipe of its own: a shared queue has a lock, which a worker that is killed while holding it would
never release. Workers are spawned, so that none inherits another's pipe: when this process ends, in
whatever way, every worker reads the end of its pipe and leaves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from specexec_cli.config import SamplingConfig
from specexec_cli.dsi.messages import (
    DRAFTER,
    Configure,
    Draft,
    End,
    Event,
    Forget,
    Ready,
    Score,
    Scored,
    Verify,
    WorkerLost,
    worker_name,
)
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

_CLOSED = -2  # an epoch that no order has, so that everything is stale


class ProcessWorkers:
    """Target servers and drafters, each with a model of its own in a process of its own.

    Args:
        servers: one picklable function for each target server, which loads it where it runs.
        drafters: the same for each drafter, in the order in which drafts are verified; empty to
            run without drafts.
        load_timeout_s: longest time that loading may take.
    Raises:
        WorkerError: a worker did not start; all are stopped.
    Attributes:
        ready: by worker number, its first message.
    """

    def __init__(
        self,
        servers: Sequence[Callable[[], TargetServer]],
        drafters: Sequence[Callable[[], DraftServer]],
        load_timeout_s: float = 600.0,
    ) -> None:
        self._context = multiprocessing.get_context("spawn")
        # an epoch for each drafter; without drafters one for DRAFTER, which tasks then name
        self._epochs = self._context.RawArray("q", max(1, len(drafters)))
        self._pipes: dict[int, Connection] = {}
        self._orders: dict[int, _Orders] = {}
        self.processes: dict[int, BaseProcess] = {}
        self._events: deque[Event] = deque()
        self._asked = 0  # orders for logits so far
        self.ready: dict[int, Ready] = {}
        builders: dict[int, Callable[[], Any]] = dict(enumerate(servers))
        self.drafters: Sequence[int] = [DRAFTER - number for number in range(len(drafters))]
        builders.update(zip(self.drafters, drafters, strict=True))
        try:
            for number, build in builders.items():
                self._start(number, build)
            self._await_ready(load_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def servers(self) -> Sequence[int]:
        """Worker numbers of the target servers that are not known to be lost."""
        return tuple(number for number in self._pipes if number >= 0)

    def now(self) -> float:
        """Seconds on this machine's monotonic clock."""
        return time.perf_counter()

    def configure(
        self, sampling: SamplingConfig, rejection: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        """Tells every worker how the next generation draws its tokens; see messages.Configure."""
        for number in list(self._pipes):
            self._send(number, Configure(sampling, rejection, tuple(prompt)))

    def end(self, tokens: Sequence[int]) -> None:
        """Tells every worker the text that a generation has ended with."""
        for number in list(self._pipes):
            self._send(number, End(tuple(tokens)))

    def forget(self) -> None:
        """Has every worker empty its cache."""
        for number in list(self._pipes):
            self._send(number, Forget())

    def verify(self, server: int, message: Verify) -> None:
        """Gives a task to an idle server; `receive` reports one that is lost."""
        self._send(server, message)

    def draft(self, message: Draft) -> None:
        """Sets a drafter to work on a new prefix."""
        self._send(message.drafter, message)

    def score(self, worker: int, order: Score, timeout_s: float) -> NDArray[np.float32]:
        """Asks one worker for logits and waits for them; other events are kept for `receive`.

        Returns:
            (len(order.tokens) - order.first, vocab).
        Raises:
            WorkerError: the worker is lost, or gave no answer in time and was killed.
            SpecexecError: its pass failed.
        """
        answer = self._ask(worker, order, timeout_s)
        if isinstance(answer, SpecexecError):
            raise answer
        return answer

    def advance_epoch(self, epoch: int, drafter: int) -> None:
        """Makes work of a drafter's earlier epochs stale."""
        # a single aligned word, so that workers see either the old number or the new one
        self._epochs[DRAFTER - drafter] = epoch

    def receive(self, timeout_s: float) -> Event | None:
        """Waits for the next event of a worker, its loss included; None if none comes in time."""
        deadline = self.now() + timeout_s
        while not self._events:
            numbers = self._readable(deadline - self.now())
            if not numbers:
                return None
            for number in numbers:
                message = self._read(number)
                if not isinstance(message, Scored):  # an answer after its request was interrupted
                    self._events.append(message)
        return self._events.popleft()

    def drop(self, worker: int) -> None:
        """Kills a worker."""
        process = self.processes.pop(worker, None)
        if process is not None:
            process.kill()
            process.join()
        # nothing reads the pipe any more, so an order stuck in it fails, and its thread can end
        orders = self._orders.pop(worker, None)
        if orders is not None:
            orders.close()
        pipe = self._pipes.pop(worker, None)
        if pipe is not None:
            pipe.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Asks every worker to leave, then kills those that do not. May be called again."""
        self._epochs[:] = [_CLOSED] * len(self._epochs)
        for number in list(self._pipes):
            self._send(number, None)
        deadline = time.monotonic() + timeout_s
        for number, process in list(self.processes.items()):
            process.join(max(0.0, deadline - time.monotonic()))
            self.drop(number)

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
        self._pipes[number], self.processes[number] = ours, process
        self._orders[number] = _Orders(ours)

    def _send(self, number: int, order: Order | None) -> None:
        orders = self._orders.get(number)
        if orders is not None:
            orders.put(order)

    def _ask(
        self, worker: int, order: Score, timeout_s: float
    ) -> NDArray[np.float32] | SpecexecError:
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
        raise WorkerError(f"DSI: {worker_name(worker)} is lost: no logits come from it")

    def _readable(self, timeout_s: float) -> list[int]:
        pipes = {id(pipe): number for number, pipe in self._pipes.items()}
        # the pipe of a dead worker is readable: reading gives its end
        ready = wait(list(self._pipes.values()), max(0.0, timeout_s))
        return [pipes[id(pipe)] for pipe in ready]

    def _read(self, number: int) -> Any:
        """Reads one message of a worker; WorkerLost if it is gone."""
        try:
            message = self._pipes[number].recv()
        except (EOFError, OSError):
            process = self.processes[number]
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
    """Sends one worker's orders from a thread, so that the orchestrator never waits for a worker.

    A worker reads no order while it runs a pass. A drafter in a long prefill may be sent so many
    restarts meanwhile that they fill its pipe.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._waiting: SimpleQueue[tuple[Order | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="specexec-dsi-orders")
        self._thread.daemon = True  # this process can end though a worker hangs
        self._thread.start()

    def put(self, order: Order | None) -> None:
        """Sends an order after those that wait; None asks the worker to leave."""
        self._waiting.put((order,))

    def close(self) -> None:
        """Ends the thread. The worker must have ended, or an order could be stuck in its pipe."""
        self._waiting.put(None)
        self._thread.join()

    def _send_all(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            # a broken pipe means a dead worker, which `receive` reports
            with contextlib.suppress(OSError):
                self._pipe.send(*waiting)


class _Mailbox:
    """A worker's end of its pipe, as inbox and outbox."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def get(self) -> Any:
        """Waits for the next order; None when the other end is gone, which ends the worker."""
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            return None

    def put(self, event: Event | Scored | Ready) -> None:
        self._pipe.send(event)


def _worker_main(number: int, build: Callable[[], Any], pipe: Connection, epochs: Any) -> None:
    """The main function of a worker process: loads its model, and serves orders until the last."""

    def epoch(drafter: int) -> int:
        return int(epochs[DRAFTER - drafter])

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    mailbox = _Mailbox(pipe)
    try:
        server = build()
        mailbox.put(server.ready())
        if number <= DRAFTER:
            serve_drafter(server, mailbox, mailbox, epoch)
        else:
            serve_target(server, number, mailbox, mailbox, epoch)
        server.close()  # not after an error, which is told at once, and kills this process
    except BrokenPipeError:
        return  # the main process is gone, so there is no one to report to
    except Exception as error:
        with contextlib.suppress(OSError):
            mailbox.put(WorkerLost(number, f"{type(error).__name__}: {error}"))
