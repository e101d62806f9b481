"""The base class of pools of workers.

processes.py runs workers as processes of this machine, ray_workers.py as actors of a Ray cluster.
Each subclass says how a worker is started, sent an order, listened to and ended.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from specexec_cli.config import SamplingConfig
from specexec_cli.dsi.messages import (
    DRAFTER,
    Configure,
    Draft,
    Event,
    Forget,
    Ready,
    Score,
    Verify,
    worker_name,
)
from specexec_cli.dsi.workers import DraftServer, TargetServer
from specexec_cli.errors import SpecexecError, WorkerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class WorkerPool(ABC):
    """Target servers and drafters, each with a model of its own.

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
        load_timeout_s: float,
    ) -> None:
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
        """Worker numbers of the target servers that are alive."""
        return tuple(number for number in self._alive if number >= 0)

    def now(self) -> float:
        """Seconds on this machine's monotonic clock."""
        return time.perf_counter()

    def configure(self, sampling: SamplingConfig, rejection: bool = False) -> None:
        """Tells every worker how the next generation draws its tokens; see messages.Configure."""
        self._send_all(Configure(sampling, rejection))

    def forget(self) -> None:
        """Has every worker empty its cache."""
        self._send_all(Forget())

    def verify(self, server: int, message: Verify) -> None:
        """Gives a task to an idle server."""
        self._send(server, message)

    def draft(self, message: Draft) -> None:
        """Sets a drafter to work on a new prefix."""
        self._send(message.drafter, message)

    def score(self, worker: int, order: Score, timeout_s: float) -> NDArray[np.float32]:
        """Asks one worker for logits and waits for them; other events are kept for `receive`.

        Returns:
            (len(order.tokens) - order.first, vocab).
        Raises:
            WorkerError: the worker is lost, or gives no answer in time.
            SpecexecError: its pass failed.
        """
        answer = self._ask(worker, order, timeout_s)
        if isinstance(answer, SpecexecError):
            raise answer
        return answer

    @abstractmethod
    def advance_epoch(self, epoch: int, drafter: int) -> None:
        """Makes work of a drafter's earlier epochs stale."""

    @abstractmethod
    def receive(self, timeout_s: float) -> Event | None:
        """Waits for the next event of a worker, its loss included; None if none comes in time."""

    @abstractmethod
    def drop(self, worker: int) -> None:
        """Kills a worker."""

    @abstractmethod
    def close(self) -> None:
        """Ends every worker. May be called again."""

    @property
    @abstractmethod
    def _alive(self) -> Collection[int]:
        """Numbers of the workers that are not known to be lost."""

    @abstractmethod
    def _start(self, number: int, build: Callable[[], Any]) -> None:
        """Starts a worker, which begins to load its model."""

    @abstractmethod
    def _await_ready(self, timeout_s: float) -> None:
        """Waits until all workers have loaded, and fills in `ready`.

        Raises:
            WorkerError: a worker failed to load, or took too long.
        """

    @abstractmethod
    def _send(self, number: int, order: Configure | Forget | Verify | Draft) -> None:
        """Sends a worker an order; has no effect on a lost worker, which `receive` reports."""

    @abstractmethod
    def _ask(
        self, worker: int, order: Score, timeout_s: float
    ) -> NDArray[np.float32] | SpecexecError:
        """Sends an order for logits and waits for the answer.

        Raises:
            WorkerError: the worker is lost, or gives no answer in time.
        """

    def _send_all(self, order: Configure | Forget) -> None:
        for number in list(self._alive):
            self._send(number, order)


def lost_without_answer(worker: int) -> WorkerError:
    """The error where a worker that was asked for logits is lost."""
    return WorkerError(f"DSI: {worker_name(worker)} is lost: no logits come from it")
