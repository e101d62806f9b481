"""A pool of workers as Ray actors, on any machine of a Ray cluster.

Ray carries the messages, places actors on GPUs and reports dead ones. It is an optional extra, and
imported when a cluster is connected to. Every machine of the cluster needs specexec and the models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specexec_cli.config import SamplingConfig
from specexec_cli.dsi.messages import (
    Aborted,
    Configure,
    Draft,
    Drafted,
    Event,
    Failed,
    Forget,
    Ready,
    Score,
    Scored,
    Verified,
    Verify,
    WorkerLost,
    worker_name,
)
from specexec_cli.dsi.pool import WorkerPool, lost_without_answer
from specexec_cli.dsi.workers import (
    DraftServer,
    Epoch,
    TargetServer,
    run_draft,
    run_score,
    run_task,
)
from specexec_cli.errors import ConfigError, SpecexecError, WorkerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LOCAL = "local"  # --ray local: a Ray instance of our own, on this machine


class Worker:
    """The class of the actors: one thread does the work, another only receives new epochs."""

    def __init__(self, number: int, build: Callable[[], Any]) -> None:
        self._number = number
        self._server = build()
        self._epochs: dict[int, int] = {}

    def ready(self) -> Ready:
        """The worker's first message, once the model is loaded."""
        ready: Ready = self._server.ready()
        return ready

    def configure(self, sampling: SamplingConfig, rejection: bool) -> None:
        """Sets how the next generation draws its tokens."""
        self._server.configure(sampling, rejection)

    def forget(self) -> None:
        """Empties the cache."""
        self._server.forget()

    def score(self, order: Score) -> Scored:
        """The logits of a text."""
        return run_score(self._server, order)

    def advance_epoch(self, epoch: int, drafter: int) -> None:
        """Makes work of a drafter's earlier epochs stale."""
        self._epochs[drafter] = max(self._epochs.get(drafter, 0), epoch)

    def verify(self, task: Verify) -> Verified | Aborted | Failed:
        """Does one verification task."""
        return run_task(self._server, self._number, task, self._epoch_since(task.epoch))

    def draft(self, order: Draft) -> Any:
        """Yields tokens one by one, as they are drafted."""
        yield from run_draft(self._server, order, self._epoch_since(order.epoch))

    def _epoch_since(self, epoch: int) -> Epoch:
        # an order may arrive before the message that begins its epoch; epochs only rise
        return lambda drafter: max(self._epochs.get(drafter, 0), epoch)


class RayCluster:
    """A connection to a Ray cluster.

    Args:
        address: of the cluster; "auto" for the one that this machine belongs to, "local" for a new
            instance on this machine.
    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, address: str) -> None:
        try:
            self.ray: Any = import_module("ray")
        except ImportError as error:
            raise ConfigError("`ray` needs Ray, which is not installed: pip install ray") from error
        self._ours = not self.ray.is_initialized()  # whoever connected also disconnects
        if not self._ours:
            return
        quiet = {"log_to_driver": False, "logging_level": "error"}
        try:
            if address == LOCAL:
                # our actors claim no CPUs, so one idle worker process of Ray is enough
                self.ray.init(
                    num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, **quiet
                )
            else:
                self.ray.init(address=address, **quiet)
        except Exception as error:  # Ray raises many types here, Exception itself included
            first = str(error).strip().splitlines()[0]
            raise ConfigError(f"`ray='{address}'`: cannot reach or start Ray: {first}") from error

    @property
    def gpus(self) -> int:
        """How many GPUs the cluster's machines have together."""
        return int(self.ray.cluster_resources().get("GPU", 0))

    def close(self) -> None:
        """Disconnects, and ends a local instance. May be called again."""
        if self._ours:
            self._ours = False
            self.ray.shutdown()


class RayWorkers(WorkerPool):
    """Target servers and drafters as Ray actors; see WorkerPool for the other arguments.

    Args:
        cluster: is closed with the pool.
        gpus: GPUs of each actor, 0 to run on the CPU.
    """

    def __init__(
        self,
        cluster: RayCluster,
        servers: Sequence[Callable[[], TargetServer]],
        drafters: Sequence[Callable[[], DraftServer]],
        *,
        gpus: float,
        load_timeout_s: float = 600.0,
    ) -> None:
        self._cluster, self._ray = cluster, cluster.ray
        # a second thread for `advance_epoch`, which must get through while the first one works
        self._actor = self._ray.remote(
            concurrency_groups={"control": 1}, num_cpus=0, num_gpus=gpus
        )(Worker)
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, int] = {}  # worker number by awaited answer
        self._drafts: dict[Any, int] = {}  # drafter's number by the stream of its present order
        super().__init__(servers, drafters, load_timeout_s)

    def advance_epoch(self, epoch: int, drafter: int) -> None:
        """See WorkerPool."""
        for actor in self._actors.values():
            actor.advance_epoch.options(concurrency_group="control").remote(epoch, drafter)

    def receive(self, timeout_s: float) -> Event | None:
        """See WorkerPool."""
        deadline = self.now() + timeout_s
        while True:
            awaited = [*self._pending, *self._drafts]
            left = max(0.0, deadline - self.now())
            if not awaited:
                time.sleep(left)
                return None
            found, _ = self._ray.wait(awaited, num_returns=1, timeout=min(left, 3600.0))
            if not found:
                return None
            stream = found[0] in self._drafts
            event = self._next_draft(found[0]) if stream else self._answer(found[0])
            if event is not None:
                return event

    def drop(self, worker: int) -> None:
        """See WorkerPool."""
        actor = self._actors.pop(worker, None)
        if actor is not None:
            self._ray.kill(actor)
        self._end_stream(worker)
        self._pending = {ref: owner for ref, owner in self._pending.items() if owner != worker}

    def close(self) -> None:
        """Kills every actor and leaves the cluster. May be called again."""
        for number in list(self._actors):
            self.drop(number)
        self._cluster.close()

    @property
    def _alive(self) -> Collection[int]:
        return self._actors

    def _start(self, number: int, build: Callable[[], Any]) -> None:
        self._actors[number] = self._actor.remote(number, build)

    def _send(self, number: int, order: Configure | Forget | Verify | Draft) -> None:
        actor = self._actors.get(number)
        if actor is None:
            return
        if isinstance(order, Configure):
            actor.configure.remote(order.sampling, order.rejection)
        elif isinstance(order, Forget):
            actor.forget.remote()
        elif isinstance(order, Verify):
            self._pending[actor.verify.remote(order)] = number
        else:  # drafts that still come for the older prefix are not read
            self._end_stream(number)
            self._drafts[actor.draft.options(num_returns="streaming").remote(order)] = number

    def _ask(
        self, worker: int, order: Score, timeout_s: float
    ) -> NDArray[np.float32] | SpecexecError:
        """See WorkerPool. A lost worker stays in the pool: its next task reports the loss."""
        if worker not in self._actors:
            raise lost_without_answer(worker)
        name = worker_name(worker)
        try:
            asked = self._actors[worker].score.remote(order)
            answer: Scored = self._ray.get(asked, timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise WorkerError(f"DSI: {name} gave no logits for {timeout_s:g} s") from error
        except self._ray.exceptions.RayError as error:
            raise WorkerError(f"DSI: {name} is lost: {_reason(error)}") from error
        return answer.logits

    def _end_stream(self, drafter: int) -> None:
        self._drafts = {stream: of for stream, of in self._drafts.items() if of != drafter}

    def _next_draft(self, stream: Any) -> Drafted | WorkerLost | None:
        drafter = self._drafts[stream]
        try:
            drafted: Drafted = self._ray.get(next(stream))
            return drafted
        except StopIteration:
            self._end_stream(drafter)
            return None
        except self._ray.exceptions.RayError as error:
            return self._lost(drafter, error)

    def _answer(self, ref: Any) -> Event:
        worker = self._pending.pop(ref)
        try:
            event: Verified | Aborted | Failed = self._ray.get(ref)
            return event
        except self._ray.exceptions.RayError as error:
            return self._lost(worker, error)

    def _lost(self, worker: int, error: Exception) -> WorkerLost:
        self.drop(worker)
        return WorkerLost(worker, _reason(error))

    def _await_ready(self, timeout_s: float) -> None:
        refs = {number: actor.ready.remote() for number, actor in self._actors.items()}
        deadline = self.now() + timeout_s
        for number, ref in refs.items():
            name = worker_name(number)
            try:
                self.ready[number] = self._ray.get(ref, timeout=max(0.0, deadline - self.now()))
            except self._ray.exceptions.GetTimeoutError as error:
                raise WorkerError(
                    f"DSI: {name} was not ready within {timeout_s:g} s: the Ray cluster may lack "
                    "free GPUs for it; use fewer servers (`sp`)"
                ) from error
            except self._ray.exceptions.RayError as error:
                raise WorkerError(f"DSI: {name} did not start: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first sentence of the last line of Ray's error: it names the cause, before guesses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].split(". ")[0] if lines else type(error).__name__
