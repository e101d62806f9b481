"""The words of engines: a text that is asked for, the same text as it runs, and what runs it."""

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
    constraint: Constraint | None = None  # it follows one text: no other request may have it
    top_logprobs: int | None = None  # see sampling.Sampler


class Running:
    """A text that an engine was asked for: waiting, under way, or ended.

    An engine's thread produces it; any other may read it, wait for it and cancel it.
    """

    def __init__(self, request: TextRequest) -> None:
        self.request = request
        self.stats = GenerationStats()  # the engine's, up to date after each pass
        self.progress: PassProgress | None = None  # of the pass that the text is in
        self.finish: Finish | None = None
        self.error: Exception | None = None  # with "failed"
        self.asked_s = time.perf_counter()
        self.began_s: float | None = None  # when it left the queue
        self._steps: deque[StepResult] = deque()
        self._changed = threading.Condition()
        self._cancelled = False
        self._listener: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended; steps may still be there to take."""
        return self.finish is not None

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants the rest of it: an engine asks before each pass."""
        return self._cancelled

    @property
    def waited_s(self) -> float:
        """Seconds in the queue."""
        return (time.perf_counter() if self.began_s is None else self.began_s) - self.asked_s

    def cancel(self) -> None:
        """Ends it before its next pass; from any thread, as often as one likes."""
        self._cancelled = True

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls back, in the engine's thread, whenever there is something to take or it has ended.

        What has happened by now is called for at once, in this thread.
        """
        with self._changed:
            self._listener = listener
            missed = bool(self._steps) or self.done
        if missed:
            listener()

    def take(self) -> list[StepResult]:
        """The steps that have come since it was last asked; does not wait."""
        with self._changed:
            taken = list(self._steps)
            self._steps.clear()
        return taken

    def __iter__(self) -> Iterator[StepResult]:
        """Each step as it comes.

        Raises:
            Exception: what ended the text, where it failed.
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
        """The engine's: it has left the queue."""
        self.began_s = time.perf_counter()

    def put(self, step: StepResult) -> None:
        """The engine's: one more step."""
        with self._changed:
            self._steps.append(step)
            self._changed.notify_all()
        self._tell()

    def end(self, finish: Finish, error: Exception | None = None) -> None:
        """The engine's: no more steps."""
        with self._changed:
            self.finish, self.error = finish, error
            self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """What an engine is doing, and has done since it began."""

    slots: int  # texts that can be under way at once
    running: int
    waiting: int
    most_waiting: int
    passes: int
    generated_tokens: int
    bytes_streamed: int
    texts: Mapping[Finish, int]  # that have ended, by how
    failed: bool = False  # an error of specexec itself has ended its thread
    failing: str | None = None  # why the last pass failed, as the next ones will: see lasting


def lasting(error: Exception) -> str | None:
    """Why the passes that follow will fail as this one did, until files, devices or workers are
    what they were; None where the error was of one pass or text.
    """
    return str(error) if isinstance(error, StreamError | WorkerError) else None


class Engine(Protocol):
    """Generates the texts it is asked for, each as a session would generate it alone."""

    def submit(self, request: TextRequest) -> Running:
        """Takes a text into the queue; from any thread.

        Raises:
            ConfigError: the prompt is empty or does not fit the context window, or this engine
                cannot do what is asked for.
            QueueFullError: too many are waiting, or the engine is closed.
            EngineFailedError: the engine has ended by an error of its own.
        """

    def figures(self) -> EngineFigures:
        """What it is doing; from any thread."""

    def close(self) -> None:
        """Ends every text as cancelled, and the engine's thread; the session stays open.

        Idempotent.
        """
