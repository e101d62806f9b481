"""What every pool of workers does, wherever its workers run.

processes.py starts them as processes of this machine, ray_workers.py as actors of a Ray cluster:
each says how one worker is started, sent an order, listened to and ended.
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
    """Target servers and a drafter, each with a model of its own.

    Args:
        servers: one picklable function per target server, called where it runs to load it.
        drafters: likewise, the one whose drafts go first in front; empty to run without drafts.
        load_timeout_s: how long loading may take.
    Raises:
        WorkerError: a worker did not come up; all are stopped.
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
        """Numbers of the target servers that are alive."""
        return tuple(number for number in self._alive if number >= 0)

    def now(self) -> float:
        """Seconds of this machine's monotonic clock."""
        return time.perf_counter()

    def configure(self, sampling: SamplingConfig, rejection: bool = False) -> None:
        """Tell every worker how the next generation draws its tokens; see messages.Configure."""
        self._send_all(Configure(sampling, rejection))

    def forget(self) -> None:
        """Let every worker empty its cache."""
        self._send_all(Forget())

    def verify(self, server: int, message: Verify) -> None:
        """Hand a task to an idle server."""
        self._send(server, message)

    def draft(self, message: Draft) -> None:
        """Set a drafter to work on a new prefix."""
        self._send(message.drafter, message)

    def score(self, worker: int, order: Score, timeout_s: float) -> NDArray[np.float32]:
        """Ask one worker for logits and wait for them; what else comes waits for receive().

        Raises:
            WorkerError: it is lost, or gives no answer in time.
            SpecexecError: its pass failed.
        """
        answer = self._ask(worker, order, timeout_s)
        if isinstance(answer, SpecexecError):
            raise answer
        return answer

    @abstractmethod
    def advance_epoch(self, epoch: int, drafter: int) -> None:
        """Make work of a drafter's earlier epochs stale."""

    @abstractmethod
    def receive(self, timeout_s: float) -> Event | None:
        """The next event of a worker, its death included; None where none comes in time."""

    @abstractmethod
    def drop(self, worker: int) -> None:
        """Kill a worker."""

    @abstractmethod
    def close(self) -> None:
        """End every worker; idempotent."""

    @property
    @abstractmethod
    def _alive(self) -> Collection[int]:
        """Numbers of the workers that are not known to be lost."""

    @abstractmethod
    def _start(self, number: int, build: Callable[[], Any]) -> None:
        """Begins to load a worker."""

    @abstractmethod
    def _await_ready(self, timeout_s: float) -> None:
        """Fills in `ready`.

        Raises:
            WorkerError: a worker failed to load, or took too long.
        """

    @abstractmethod
    def _send(self, number: int, order: Configure | Forget | Verify | Draft) -> None:
        """Hands a worker an order; nothing happens where it is lost, which receive() tells."""

    @abstractmethod
    def _ask(
        self, worker: int, order: Score, timeout_s: float
    ) -> NDArray[np.float32] | SpecexecError:
        """The worker's answer to an order for logits.

        Raises:
            WorkerError: it is lost, or gives no answer in time.
        """

    def _send_all(self, order: Configure | Forget) -> None:
        for number in list(self._alive):
            self._send(number, order)


def lost_without_answer(worker: int) -> WorkerError:
    """The error of a worker that was asked for logits and is gone."""
    return WorkerError(f"DSI: {worker_name(worker)} is lost: no logits come from it")
