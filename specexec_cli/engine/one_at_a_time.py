"""The plain engine: texts take turns on a session, in the order in which they were asked for."""

from __future__ import annotations

import threading
import traceback
from collections import Counter, deque

from specexec_cli.core import GenerationStats, PassProgress
from specexec_cli.engine.text import (
    EngineFigures,
    Finish,
    QueueFullError,
    Running,
    TextRequest,
    lasting,
)
from specexec_cli.errors import SpecexecError
from specexec_cli.session.text_session import Steps, TextSession


class _Cancelled(Exception):
    """Raised by the layer callback to leave a pass between two layers."""


class OneAtATime:
    """Runs one text at a time in a thread of its own.

    The session must be used by nobody else until the engine is closed.

    Args:
        most_waiting: texts that may wait behind the one that is under way.
    """

    def __init__(self, session: TextSession, *, most_waiting: int) -> None:
        self._session = session
        self._most_waiting = most_waiting
        self._queue: deque[tuple[Running, Steps]] = deque()
        self._current: Running | None = None
        self._closed = False
        self._failing: str | None = None
        self._changed = threading.Condition()  # guards all of these
        self._texts: Counter[Finish] = Counter()
        self._ended = GenerationStats()  # sums over texts that have ended
        session.on_layer(self._on_layer)
        self._thread = threading.Thread(target=self._run, name="specexec-engine", daemon=True)
        self._thread.start()

    def submit(self, request: TextRequest) -> Running:
        """See Engine.submit."""
        steps = self._session.generate(
            request.prompt,
            sampling=request.sampling,
            generation=request.generation,
            constraint=request.constraint,
            top_logprobs=request.top_logprobs,
        )
        running = Running(request)
        with self._changed:
            if self._closed:
                raise QueueFullError("the server is shutting down")
            self._drop_cancelled()
            if len(self._queue) >= self._most_waiting + (self._current is None):
                raise QueueFullError(
                    f"{len(self._queue)} texts are waiting already, as many as may: try again later"
                )
            self._queue.append((running, steps))
            self._changed.notify_all()
        return running

    def figures(self) -> EngineFigures:
        """See Engine.figures."""
        with self._changed:
            running = self._current
            now = running.stats if running is not None else GenerationStats()
            return EngineFigures(
                slots=1,
                running=int(running is not None),
                waiting=len(self._queue),
                most_waiting=self._most_waiting,
                passes=self._ended.target_passes + now.target_passes,
                generated_tokens=self._ended.generated_tokens + now.generated_tokens,
                bytes_streamed=self._ended.bytes_streamed + now.bytes_streamed,
                texts=dict(self._texts),
                failing=self._failing,
            )

    def close(self) -> None:
        """See Engine.close."""
        with self._changed:
            self._closed = True
            if self._current is not None:
                self._current.cancel()
            self._changed.notify_all()
        self._thread.join()
        self._session.on_layer(lambda progress: None)

    def _on_layer(self, progress: PassProgress) -> None:
        running = self._current
        if running is None:  # a pass that measures what passes cost
            return
        if running.cancelled:
            raise _Cancelled
        running.progress = progress

    def _drop_cancelled(self) -> None:
        """Makes room in the queue: what nobody waits for any more ends there."""
        kept: deque[tuple[Running, Steps]] = deque()
        for running, steps in self._queue:
            if running.cancelled:
                self._texts["cancelled"] += 1
                running.end("cancelled")
            else:
                kept.append((running, steps))
        self._queue = kept

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    for running, _ in self._queue:
                        running.cancel()
                self._drop_cancelled()
                if self._closed:
                    return
                if not self._queue:
                    continue
                running, steps = self._queue.popleft()
                self._current = running
            finish, error = self._generate(running, steps)
            with self._changed:
                self._texts[finish] += 1
                self._ended.target_passes += running.stats.target_passes
                self._ended.generated_tokens += running.stats.generated_tokens
                self._ended.bytes_streamed += running.stats.bytes_streamed
                self._current = None
            running.end(finish, error)

    def _generate(self, running: Running, steps: Steps) -> tuple[Finish, Exception | None]:
        """Runs one text to its end."""
        running.began()
        try:
            for step in steps:
                running.stats = self._session.stats
                self._failing = None
                if running.cancelled:
                    break
                running.put(step)
                if step.finish_reason is not None:
                    return step.finish_reason, None
        except _Cancelled:
            pass
        except SpecexecError as error:
            self._failing = lasting(error)
            return "failed", error
        except Exception as error:  # a bug of ours must not take the other texts with it
            traceback.print_exc()
            return "failed", error
        finally:
            steps.close()
        return "cancelled", None
