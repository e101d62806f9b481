"""The types of engines: the request for a text, the text as it runs, and the Engine protocol."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.core import FinishReason, GenerationStats, PassProgress, StepResult
from specexec_cli.errors import SpecexecError, StreamError, WorkerError
from specexec_cli.sampling import Constraint

Finish = FinishReason | Literal["cancelled", "failed"]


class QueueFullError(SpecexecError):
    """An engine takes no more texts now."""


class EngineFailedError(SpecexecError):
    """An error of specexec itself has ended an engine's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """One text to generate."""

    prompt: tuple[int, ...]  # tokens, at least one
    sampling: SamplingConfig
    generation: GenerationConfig
    constraint: Constraint | None = None  # must not be shared with another request
    top_logprobs: int | None = None  # see sampling.Sampler


class Running:
    """A text that an engine was asked for: waiting, under way, or ended.

    The engine's thread produces it; any other thread may read it, wait for it and cancel it.

    Attributes:
        request: what was asked for.
        stats: up to date after each pass.
        progress: of the pass that carries the text at the moment.
        finish: how it ended; None until then.
        error: why it failed, if `finish` is "failed".
        asked_s, began_s: time.perf_counter() when it was asked for, and when it left the queue.
    """

    def __init__(self, request: TextRequest) -> None:
        self.request = request
        self.stats = GenerationStats()
        self.progress: PassProgress | None = None
        self.finish: Finish | None = None
        self.error: Exception | None = None
        self.asked_s = time.perf_counter()
        self.began_s: float | None = None
        self._steps: deque[StepResult] = deque()
        self._changed = threading.Condition()
        self._cancelled = False
        self._listener: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Whether the text has ended; there may still be steps to take."""
        return self.finish is not None

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called; the engine asks before each pass."""
        return self._cancelled

    @property
    def waited_s(self) -> float:
        """Seconds that the text has waited in the queue, so far or in all."""
        return (time.perf_counter() if self.began_s is None else self.began_s) - self.asked_s

    def cancel(self) -> None:
        """Has the text end before its next pass. May be called from any thread, and again."""
        self._cancelled = True

    def listen(self, listener: Callable[[], None]) -> None:
        """Sets a function that is called whenever a step has come or the text has ended.

        It is called in the engine's thread; if something has come already, also now, in the
        caller's thread.
        """
        with self._changed:
            self._listener = listener
            missed = bool(self._steps) or self.done
        if missed:
            listener()

    def take(self) -> list[StepResult]:
        """The steps that have come since the last call; does not wait."""
        with self._changed:
            taken = list(self._steps)
            self._steps.clear()
        return taken

    def __iter__(self) -> Iterator[StepResult]:
        """Yields each step as it comes, until the text has ended.

        Raises:
            Exception: the error of a text that failed.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._steps or self.done)
                step = self._steps.popleft() if self._steps else None
            if step is None:
                if self.error is not None:
                    raise self.error
                return
            yield step

    def began(self) -> None:
        """Notes that the text has left the queue. For the engine."""
        self.began_s = time.perf_counter()

    def put(self, step: StepResult) -> None:
        """Adds a step. For the engine."""
        with self._changed:
            self._steps.append(step)
            self._changed.notify_all()
        self._tell()

    def end(self, finish: Finish, error: Exception | None = None) -> None:
        """Ends the text. For the engine."""
        with self._changed:
            self.finish, self.error = finish, error
            self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """What an engine is doing, and sums since it began."""

    slots: int  # most texts under way at once
    running: int  # texts under way
    waiting: int  # texts in the queue
    most_waiting: int
    passes: int
    generated_tokens: int
    bytes_streamed: int
    texts: Mapping[Finish, int]  # number of texts that have ended, by how they did
    failed: bool = False  # whether an error of specexec itself has ended the engine's thread
    failing: str | None = None  # why the last pass failed, if the next will too: see `lasting`


def lasting(error: Exception) -> str | None:
    """The message of an error of files, devices or workers, which the next passes will meet too
    until it is mended; None for an error of one pass or one text."""
    return str(error) if isinstance(error, StreamError | WorkerError) else None


class Engine(Protocol):
    """Generates texts, each as a session would generate it alone."""

    def submit(self, request: TextRequest) -> Running:
        """Puts a text into the queue. May be called from any thread.

        Raises:
            ConfigError: the prompt is empty or does not fit the context window, or this engine
                cannot do what is asked for.
            QueueFullError: too many texts are waiting, or the engine is closed.
            EngineFailedError: an error of specexec itself has ended the engine.
        """

    def figures(self) -> EngineFigures:
        """What the engine is doing. May be called from any thread."""

    def close(self) -> None:
        """Ends every text as cancelled, and the engine's thread; the session stays open.

        May be called again.
        """
