"""The engine that runs one text after another, in the order in which they were asked for."""

from __future__ import annotations

from specexec_cli.core import GenerationStats, PassProgress
from specexec_cli.engine.queued import Cancelled, QueuedEngine, tell_bug
from specexec_cli.engine.text import Finish, Running, TextRequest, lasting
from specexec_cli.errors import SpecexecError
from specexec_cli.session.text_session import Steps, TextSession


class OneAtATime(QueuedEngine[Steps]):
    """Runs one text at a time in a thread of its own.

    Until the engine is closed, only it may use the session.

    Args:
        session: generates the texts.
        most_waiting: most texts that wait while one is under way.
    """

    def __init__(self, session: TextSession, *, most_waiting: int) -> None:
        self._session = session
        self._current: Running | None = None
        self._passed = GenerationStats()  # sums over the texts that have ended
        session.on_layer(self._on_layer)
        super().__init__(slots=1, most_waiting=most_waiting)

    def _checked(self, request: TextRequest) -> Steps:
        return self._session.generate(
            request.prompt,
            sampling=request.sampling,
            generation=request.generation,
            constraint=request.constraint,
            top_logprobs=request.top_logprobs,
        )

    def _under_way(self) -> list[Running]:
        return [self._current] if self._current is not None else []

    def _counts(self) -> tuple[int, int, int]:
        every = [self._passed, *(running.stats for running in self._under_way())]
        return (
            sum(stats.target_passes for stats in every),
            sum(stats.generated_tokens for stats in every),
            sum(stats.bytes_streamed for stats in every),
        )

    def _leave(self, running: Running) -> None:
        passed, stats = self._passed, running.stats
        passed.target_passes += stats.target_passes
        passed.generated_tokens += stats.generated_tokens
        passed.bytes_streamed += stats.bytes_streamed
        self._current = None

    def close(self) -> None:
        """See Engine.close."""
        super().close()
        self._session.on_layer(lambda progress: None)

    def _on_layer(self, progress: PassProgress) -> None:
        running = self._current
        if running is None:  # a pass of the session's own, which measures what passes cost
            return
        if running.cancelled:
            raise Cancelled
        running.progress = progress

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                self._drop_cancelled()
                if self._closed:
                    return
                if not self._queue:
                    continue
                running, steps = self._queue.popleft()
                self._current = running
            self._end(running, *self._generate(running, steps))

    def _generate(self, running: Running, steps: Steps) -> tuple[Finish, Exception | None]:
        """Runs one text to its end; returns how it ended, and the error if it failed."""
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
        except Cancelled:
            pass
        except Exception as error:  # even a bug of ours must not end the other texts
            tell_bug(error)
            if isinstance(error, SpecexecError):
                self._failing = lasting(error)
            return "failed", error
        finally:
            steps.close()
        return "cancelled", None
