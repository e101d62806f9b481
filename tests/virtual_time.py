"""Threads, locks and a GPU's copy engine under a virtual clock, so that the copier can be timed.

Exactly one thread runs at a time; time passes only where all of them wait. `threading` of the
modules under test is replaced by VirtualTime, which also decides, by a seed, which of the threads
that could go on does: a deadlock is an error here, and races are found again.

The device has one copy engine, which takes copies in the order in which they were handed to it,
and a stream that computes. It checks what no real one can: that bytes do not change under a copy
and that nothing is written under a computation.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from specexec_cli.errors import StreamError
from specexec_cli.offload import copier, memory, stream, uplink
from specexec_cli.offload.reader import DirectFile
from specexec_cli.offload.slabs import SWITCH_S


class DeadlockError(BaseException):
    """Every thread waits for another."""


@dataclass(eq=False)
class _Task:
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    doomed: bool = False


class VirtualTime:
    """The clock, the scheduler, and what stands for the module `threading`."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self.failure: BaseException | None = None  # of another thread
        self._random = random.Random(seed)
        self._ready: list[_Task] = []
        self._asleep: list[tuple[float, int, _Task]] = []
        self._numbers = itertools.count()
        self._main = self.running = _Task()

    def Lock(self) -> VirtualLock:
        return VirtualLock(self)

    def Condition(self, lock: VirtualLock | None = None) -> VirtualCondition:
        return VirtualCondition(self, lock or self.Lock())

    def Thread(
        self, target: Callable[[], None], name: str = "", daemon: bool = True
    ) -> VirtualThread:
        return VirtualThread(self, target)

    def sleep(self, seconds: float) -> None:
        heapq.heappush(self._asleep, (self.now + seconds, next(self._numbers), self.running))
        self.block()

    def give_way(self) -> None:
        """Lets another thread run first, perhaps."""
        self._ready.append(self.running)
        self.block()

    def wake(self, task: _Task) -> None:
        self._ready.append(task)

    def block(self) -> None:
        """Runs others until somebody wakes this thread."""
        me, chosen = self.running, self._choose()
        if chosen is not me:
            self._pass_on(chosen)
            me.baton.acquire()
        if me.doomed:
            raise DeadlockError(f"at {self.now} s") from self.failure

    def leave(self) -> None:
        """Runs others for good."""
        self._pass_on(self._choose())

    def _pass_on(self, task: _Task) -> None:
        self.running = task
        task.baton.release()

    def _choose(self) -> _Task:
        if self._ready:
            return self._ready.pop(self._random.randrange(len(self._ready)))
        if self._asleep:
            self.now, _, task = heapq.heappop(self._asleep)
            return task
        self._main.doomed = True
        return self._main


class VirtualLock:
    """Handed on in the order in which it was asked for."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._held = False
        self._waiting: list[_Task] = []

    def acquire(self) -> None:
        self._time.give_way()
        if self._held:
            self._waiting.append(self._time.running)
            self._time.block()
        self._held = True

    def release(self) -> None:
        if self._waiting:
            self._time.wake(self._waiting.pop(0))
        else:
            self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class VirtualCondition:
    def __init__(self, time: VirtualTime, lock: VirtualLock) -> None:
        self._time, self._lock = time, lock
        self._waiting: list[_Task] = []

    def wait(self) -> None:
        self._waiting.append(self._time.running)
        self._lock.release()
        self._time.block()
        self._lock.acquire()

    def notify_all(self) -> None:
        for task in self._waiting:
            self._time.wake(task)
        self._waiting.clear()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


class VirtualThread:
    def __init__(self, time: VirtualTime, target: Callable[[], None]) -> None:
        self._time, self._target = time, target
        self._task = _Task()
        self._over = VirtualEvent(time)
        self._real = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._time.wake(self._task)
        self._real.start()

    def join(self) -> None:
        self._over.wait()
        self._real.join()

    def _run(self) -> None:
        self._task.baton.acquire()
        try:
            self._target()
        except BaseException as failure:  # raised where the clock ends
            self._time.failure = failure
        self._over.set()
        self._time.leave()


class VirtualEvent:
    def __init__(self, time: VirtualTime, done: bool = False) -> None:
        self._time = time
        self.done = done
        self._waiting: list[_Task] = []

    def set(self) -> None:
        self.done = True
        for task in self._waiting:
            self._time.wake(task)
        self._waiting.clear()

    def wait(self) -> None:
        while not self.done:
            self._waiting.append(self._time.running)
            self._time.block()


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """How fast things are, in bytes per virtual second, and how much memory can be pinned."""

    link_bytes_per_s: float
    ssd_bytes_per_s: float
    memcpy_bytes_per_s: float
    copy_overhead_s: float = 5e-6  # of the engine, for each copy
    call_s: float = 50e-6  # of Python, for each piece that the copier sends
    switch_s: float = (
        SWITCH_S  # after which Python takes the interpreter from a thread that computes
    )
    pins_bytes: int = 1 << 62


@dataclass(eq=False)
class _Copy:
    n_bytes: int
    perform: Callable[[], None]
    after: VirtualEvent
    event: VirtualEvent
    upload: bool
    begin: Callable[[], None] = lambda: None
    submitted: float = 0.0


class VirtualDevice:
    """A Link, and the device behind it."""

    device = torch.device("cpu")

    def __init__(self, time: VirtualTime, hardware: Hardware) -> None:
        self.time, self.hardware = time, hardware
        self.gil = VirtualLock(time)
        self.registered: dict[int, int] = {}
        self.busy_s = 0.0  # of the copy engine with pieces
        self.upload_delays_s: list[float] = []
        self.fail_copy = self.fail_read = -1  # that which so many others precede raises
        self._copies: list[_Copy] = []
        self._work: list[Callable[[], None]] = []
        self._more = VirtualCondition(time, VirtualLock(time))
        self._threads = [VirtualThread(time, self._engine), VirtualThread(time, self._compute)]
        self._closing = False
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Behind the last work. The engine ends with what it was given."""
        with self._more:
            self._closing = True
            self._more.notify_all()
        for thread in self._threads:
            thread.join()
        assert not self.registered, "memory was freed while it was registered"

    def own_thread(self) -> None:
        pass

    def register(self, blob: Tensor) -> bool:
        if sum(self.registered.values()) + blob.numel() > self.hardware.pins_bytes:
            return False
        self.registered[blob.data_ptr()] = blob.numel()
        return True

    def unregister(self, blob: Tensor) -> None:
        del self.registered[blob.data_ptr()]

    def copy(self, target: Tensor, source: Tensor, after: VirtualEvent) -> VirtualEvent:
        """Called by the copier, who needs the interpreter for it."""
        with self.gil:
            self.time.sleep(self.hardware.call_s)
        self.fail_copy -= 1
        if self.fail_copy == -1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        before: list[Tensor] = []

        def perform() -> None:
            assert torch.equal(before[0], source), "the source was overwritten under the copy"
            target.copy_(source)

        return self._submit(
            _Copy(source.numel(), perform, after, VirtualEvent(self.time), False,
                  lambda: before.append(source.clone()))
        )  # fmt: skip

    def compute_waits(self, event: VirtualEvent) -> None:
        self._enqueue(event.wait)

    def compute_mark(self) -> VirtualEvent:
        event = VirtualEvent(self.time)
        self._enqueue(event.set)
        return event

    def wait(self, event: VirtualEvent) -> None:
        event.wait()

    def compute(self, seconds: float, check: Callable[[], None] = lambda: None) -> None:
        """Enqueue work; what it reads must be right as it begins and as it ends."""

        def run() -> None:
            check()
            self.time.sleep(seconds)
            check()

        self._enqueue(run)

    def upload(self) -> None:
        """Enqueue a small upload of a draft step's inputs."""

        def run() -> None:
            done = VirtualEvent(self.time, done=True)
            event = self._submit(_Copy(0, lambda: None, done, VirtualEvent(self.time), True))
            event.wait()

        self._enqueue(run)

    def python(self, seconds: float) -> None:
        """Python computes; it hands the interpreter over where others ask for it."""
        while seconds > 0:
            with self.gil:
                self.time.sleep(min(seconds, self.hardware.switch_s))
            seconds -= self.hardware.switch_s

    def _submit(self, copy: _Copy) -> VirtualEvent:
        copy.submitted = self.time.now
        with self._more:
            self._copies.append(copy)
            self._more.notify_all()
        return copy.event

    def _enqueue(self, work: Callable[[], None]) -> None:
        with self._more:
            self._work.append(work)
            self._more.notify_all()

    def _engine(self) -> None:
        while True:
            with self._more:
                while not (chosen := self._eligible()):
                    if self._closing and not self._copies:
                        return
                    self._more.wait()
                self._copies.remove(chosen)
            chosen.begin()
            seconds = chosen.n_bytes / self.hardware.link_bytes_per_s
            if chosen.upload:
                self.upload_delays_s.append(self.time.now - chosen.submitted)
            else:
                self.busy_s += seconds
            self.time.sleep(seconds + self.hardware.copy_overhead_s)
            chosen.perform()
            chosen.event.set()

    def _eligible(self) -> _Copy | None:
        """The first that may begin; pieces, which are of one stream, in their order."""
        pieces = [copy for copy in self._copies if not copy.upload][:1]
        able = [
            copy for copy in self._copies if copy.after.done and (copy.upload or copy in pieces)
        ]
        return able[0] if able else None

    def _compute(self) -> None:
        while True:
            with self._more:
                while not self._work:
                    if self._closing:
                        return
                    self._more.wait()
                work = self._work.pop(0)
            work()
            with self._more:
                self._more.notify_all()  # a copy may have waited for it


@contextmanager
def virtual_time(hardware: Hardware, seed: int = 0) -> Iterator[VirtualDevice]:
    """Streams that are opened inside the `with` live under a virtual clock, on a VirtualDevice."""
    time = VirtualTime(seed)
    disk = VirtualLock(time)
    read_into, stage = DirectFile.read_into, uplink._stage

    def read(file: DirectFile, target: memoryview, start: int, stop: int) -> int:
        with disk:
            time.sleep((stop - start) / hardware.ssd_bytes_per_s)
        device.fail_read -= 1
        if device.fail_read == -1:
            raise StreamError(f"reading {file.path} failed at byte {start}: Input/output error")
        return read_into(file, target, start, stop)

    def staged(slab: Tensor, source: Tensor) -> None:
        time.sleep(source.numel() / hardware.memcpy_bytes_per_s)
        stage(slab, source)

    device = VirtualDevice(time, hardware)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, answer in (
            (copier, "threading", time),
            (stream, "threading", time),
            (memory, "HUGE_PAGE_BYTES", 4096),
            (DirectFile, "read_into", read),
            (uplink, "_stage", staged),
        ):
            patch.setattr(owner, name, answer)
        yield device
        device.close()
        if time.failure is not None:
            raise time.failure
