"""The base class of engines: a queue that any thread may use, and a thread that runs texts."""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from typing import Generic, TypeVar

from specexec_cli.engine.text import (
    EngineFailedError,
    EngineFigures,
    Finish,
    QueueFullError,
    Running,
    TextRequest,
)
from specexec_cli.errors import SpecexecError

Work = TypeVar("Work")


class Cancelled(Exception):
    """Raised by a layer callback to leave a pass that nobody wants any more."""


class QueuedEngine(ABC, Generic[Work]):
    """An Engine with a first-in, first-out queue.

    `Work` is what a subclass turns a request into before it is queued. A subclass calls this
    constructor last, since it starts the thread.

    Args:
        slots: most texts under way at once.
        most_waiting: most texts that wait while `slots` are under way.
    """

    def __init__(self, *, slots: int, most_waiting: int) -> None:
        self._slots, self._most_waiting = slots, most_waiting
        self._queue: deque[tuple[Running, Work]] = deque()
        self._closed = self._failed = False
        self._failing: str | None = None
        self._ended: Counter[Finish] = Counter()
        self._changed = threading.Condition()  # guards the fields above and the texts under way
        self._thread = threading.Thread(target=self._run, name="specexec-engine", daemon=True)
        self._thread.start()

    @abstractmethod
    def _checked(self, request: TextRequest) -> Work:
        """Checks a request and turns it into work; raises as Engine.submit says."""

    @abstractmethod
    def _under_way(self) -> list[Running]:
        """The texts that have left the queue and have not ended."""

    @abstractmethod
    def _counts(self) -> tuple[int, int, int]:
        """Passes, generated tokens and streamed bytes since the engine began."""

    @abstractmethod
    def _leave(self, running: Running) -> None:
        """Removes a text from those under way."""

    @abstractmethod
    def _serve(self) -> None:
        """Runs texts until the engine is closed; all of them must have ended then."""

    def submit(self, request: TextRequest) -> Running:
        """See Engine.submit."""
        work, running = self._checked(request), Running(request)
        with self._changed:
            if self._failed:
                raise EngineFailedError(
                    "an error of specexec itself has ended the engine, and its log has the "
                    "traceback: start the server again"
                )
            if self._closed:
                raise QueueFullError("the server is shutting down")
            self._drop_cancelled()
            if len(self._queue) >= self._most_waiting + self._slots - len(self._under_way()):
                raise QueueFullError(
                    f"{len(self._queue)} texts are waiting already, as many as may: try again later"
                )
            self._queue.append((running, work))
            self._changed.notify_all()
        return running

    def figures(self) -> EngineFigures:
        """See Engine.figures."""
        with self._changed:
            passes, tokens, streamed_bytes = self._counts()
            return EngineFigures(
                slots=self._slots,
                running=len(self._under_way()),
                waiting=len(self._queue),
                most_waiting=self._most_waiting,
                passes=passes,
                generated_tokens=tokens,
                bytes_streamed=streamed_bytes,
                texts=dict(self._ended),
                failed=self._failed,
                failing=self._failing,
            )

    def close(self) -> None:
        """See Engine.close."""
        with self._changed:
            self._closed = True
            for running in self._under_way():
                running.cancel()
            self._changed.notify_all()
        self._thread.join()

    def _drop_cancelled(self) -> None:
        """Ends the cancelled texts in the queue, to make room; all texts once the engine is
        closed."""
        kept: deque[tuple[Running, Work]] = deque()
        for running, work in self._queue:
            if self._closed or running.cancelled:
                self._ended["cancelled"] += 1
                running.end("cancelled")
            else:
                kept.append((running, work))
        self._queue = kept

    def _end(self, running: Running, finish: Finish, error: Exception | None = None) -> None:
        """Ends a text that was under way."""
        with self._changed:
            self._leave(running)
            self._ended[finish] += 1
        running.end(finish, error)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a bug of ours; no caller may be left to wait for ever
            traceback.print_exc()
            with self._changed:
                self._closed = self._failed = True
                waiting = [running for running, _ in self._queue]
                self._queue.clear()
            for running in waiting:
                running.end("failed", error)
            for running in self._under_way():
                self._end(running, "failed", error)


def tell_bug(error: Exception) -> None:
    """Prints the traceback of an error that is a bug of ours; the engine goes on."""
    if not isinstance(error, SpecexecError):
        traceback.print_exception(error)
