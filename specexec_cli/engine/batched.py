"""The engine of several texts at once: all of them go through each pass side by side.

Texts are admitted, cancelled and ended between passes, in the engine's own thread. Those that find
no free seat wait in the order in which they were asked for.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, deque
from dataclasses import dataclass, replace

from specexec_cli.core import GenerationStats, PassProgress, StepResult
from specexec_cli.decoding.batch import Batch, BatchText
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.forest import Forest
from specexec_cli.engine.text import (
    EngineFailedError,
    EngineFigures,
    Finish,
    QueueFullError,
    Running,
    TextRequest,
    lasting,
)
from specexec_cli.errors import SpecexecError, clear_shortage
from specexec_cli.models.text import TextStream
from specexec_cli.planning.memory import nodes_of_a_text
from specexec_cli.sampling import Sampler
from specexec_cli.session.local_session import LocalSession
from specexec_cli.session.text_session import GenerationRequest, count_step, with_text


class _Cancelled(Exception):
    """Raised by the layer callback: nobody wants what the pass would bring."""


@dataclass(slots=True, eq=False)
class _Text:
    """A text under way, as a person and as the batch sees it."""

    running: Running
    batched: BatchText
    stream: TextStream


class Batched:
    """Runs up to `slots` texts at once in a thread of its own.

    The session must be used by nobody else until the engine is closed.

    Args:
        slots: for which the session's memory was planned.
        most_waiting: texts that may wait behind those under way.
    Raises:
        ConfigError: the session's policy cannot size the trees of several texts.
    """

    def __init__(self, session: LocalSession, *, slots: int, most_waiting: int) -> None:
        self._session = session
        self._slots = slots
        self._most_waiting = most_waiting
        self._seats = session.seats(slots)
        self._model = self._seats[0].target.model
        self._batch = Batch(self._forest(), self._seats)
        self._queue: deque[tuple[Running, GenerationRequest]] = deque()
        self._texts: list[_Text] = []  # under way, the oldest first
        self._closed = self._failed = False
        self._changed = threading.Condition()  # guards these four and the counts
        self._ended: Counter[Finish] = Counter()
        self._passes = self._tokens = 0
        self._failing: str | None = None
        self._began = (0.0, 0)  # time and bytes streamed at the first layer of the pass
        self._model.on_layer = self._on_layer
        self._thread = threading.Thread(target=self._run, name="specexec-engine", daemon=True)
        self._thread.start()

    def _forest(self) -> Forest | None:
        drafter, session = self._seats[0].drafter, self._session
        if drafter is None:
            return None
        model = drafter.rows.model if isinstance(drafter, ModelDrafter) else None
        return Forest(model, session.pair.tree, self._slots, session.learned)

    def submit(self, request: TextRequest) -> Running:
        """See Engine.submit."""
        session = self._session
        checked = session.checked(
            request.prompt, request.generation, sampling=request.sampling, tree=session.pair.tree,
            method=session.method, continuation=[], constraint=request.constraint,
            top_logprobs=request.top_logprobs,
        )  # fmt: skip
        running = Running(request)
        with self._changed:
            if self._failed:
                raise EngineFailedError(
                    "an error of specexec itself has ended the engine, and its log has the "
                    "traceback: start the server again"
                )
            if self._closed:
                raise QueueFullError("the server is shutting down")
            self._drop_cancelled()
            if len(self._queue) >= self._most_waiting + self._slots - len(self._texts):
                raise QueueFullError(
                    f"{len(self._queue)} texts are waiting already, as many as may: try again later"
                )
            self._queue.append((running, checked))
            self._changed.notify_all()
        return running

    def figures(self) -> EngineFigures:
        """See Engine.figures."""
        with self._changed:
            return EngineFigures(
                slots=self._slots,
                running=len(self._texts),
                waiting=len(self._queue),
                most_waiting=self._most_waiting,
                passes=self._passes,
                generated_tokens=self._tokens,
                bytes_streamed=self._model.bytes_streamed,
                texts=dict(self._ended),
                failed=self._failed,
                failing=self._failing,
            )

    def close(self) -> None:
        """See Engine.close."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._model.on_layer = lambda index: None

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a bug of ours; nobody must wait for ever
            traceback.print_exc()
            with self._changed:
                self._closed = self._failed = True
                waiting = [running for running, _ in self._queue]
                self._queue.clear()
            for running in waiting:
                running.end("failed", error)
            for text in list(self._texts):
                self._end(text, "failed", error)

    def _serve(self) -> None:
        while True:
            if not self._texts:
                self._session.quiet.pause()
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._texts or self._closed)
                self._drop_cancelled()
                gone = [text for text in self._texts if self._closed or text.running.cancelled]
            for text in gone:
                self._end(text, "cancelled")
            if self._closed:
                return
            self._admit()
            if self._texts:
                self._session.quiet.begin()
                self._pass()

    def _drop_cancelled(self) -> None:
        """Makes room in the queue: what nobody waits for any more ends there."""
        kept: deque[tuple[Running, GenerationRequest]] = deque()
        for running, request in self._queue:
            if self._closed or running.cancelled:
                self._ended["cancelled"] += 1
                running.end("cancelled")
            else:
                kept.append((running, request))
        self._queue = kept

    def _admit(self) -> None:
        """Gives free seats to those that have waited longest."""
        if not self._texts:
            self._seats[0].target.recover()
        with self._changed:
            while self._queue and len(self._texts) < self._slots:
                running, request = self._queue.popleft()
                try:
                    self._texts.append(self._begun(running, request))
                except Exception as error:
                    _tell_bug(error)
                    self._ended["failed"] += 1
                    running.end("failed", error)

    def _begun(self, running: Running, request: GenerationRequest) -> _Text:
        taken = [text.batched.seat for text in self._texts]
        seat = self._batch.seat_for(request.prompt, taken)
        sampler = Sampler(request.sampling, request.constraint, request.top_logprobs)
        nodes = nodes_of_a_text(request.tree.budget, self._slots)
        seat.target.reserve(len(request.prompt) + request.max_tokens + nodes)
        if seat.drafter is not None:
            seat.drafter.configure(sampler, request.tree, self._session.learned)
        running.began()
        session = self._session
        running.stats = GenerationStats(
            prompt_tokens=len(request.prompt), link_bytes_per_s=session.link_bytes_per_s
        )
        return _Text(
            running,
            BatchText(seat, sampler, request.prompt, request.max_tokens, session.eos_ids),
            TextStream(session.tokenizer, request.prompt, request.stop),
        )

    def _pass(self) -> None:
        """One pass, and what it brings to those who wait for it."""
        texts = list(self._texts)
        asked_before, held_before = self._session.experts_counted()
        try:
            with clear_shortage("it ran out while tokens were drafted or chosen"):
                outcomes = self._batch.step([text.batched for text in texts])
        except _Cancelled:
            return
        except Exception as error:
            _tell_bug(error)
            self._failing = lasting(error)
            for text in texts:
                self._end(text, "failed", error)
            return
        self._passes += 1
        self._failing = None
        asked, held = self._session.experts_counted()
        carried = [text for text in texts if text.batched.carried]
        for text in carried:  # each has its share of the pass, as of the bytes
            text.running.stats.experts_asked += (asked - asked_before) // len(carried)
            text.running.stats.experts_held += (held - held_before) // len(carried)
        for text, outcome in zip(texts, outcomes, strict=True):
            if isinstance(outcome, SpecexecError):
                self._end(text, "failed", outcome)
            elif outcome is not None:
                try:
                    self._deliver(text, outcome)
                except Exception as error:
                    _tell_bug(error)
                    self._end(text, "failed", error)

    def _deliver(self, text: _Text, plain: StepResult) -> None:
        running, batched, count = text.running, text.batched, len(plain.tokens)
        logprobs = batched.sampler.recorded(len(batched.context) - count, count)
        step = with_text(replace(plain, logprobs=logprobs), text.stream)
        assert running.began_s is not None
        count_step(running.stats, step, time.perf_counter() - running.began_s)
        running.stats.peak_vram_bytes = self._session.peak_vram_bytes()
        self._tokens += len(step.tokens)
        running.put(step)
        if step.finish_reason is not None:
            self._end(text, step.finish_reason)

    def _end(self, text: _Text, finish: Finish, error: Exception | None = None) -> None:
        with self._changed:
            self._texts.remove(text)
            self._ended[finish] += 1
        text.running.end(finish, error)

    def _on_layer(self, index: int) -> None:
        """Tells everybody how far the pass is; leaves one that nobody waits for any more."""
        texts = self._texts
        if self._closed or (texts and all(text.running.cancelled for text in texts)):
            raise _Cancelled
        now, streamed = time.perf_counter(), self._model.bytes_streamed
        if index == 0:
            self._began = now, streamed
        began_s, began_bytes = self._began
        for text in texts:
            text.running.progress = PassProgress(
                number=text.running.stats.target_passes + 1,
                layer=index + 1,
                layers=self._session.layers,
                bytes_per_s=(streamed - began_bytes) / (now - began_s) if index else 0.0,
                draft_nodes=text.batched.seat.target.tree_nodes,
            )


def _tell_bug(error: Exception) -> None:
    """Shows what is a bug of ours: it ends the texts that it concerns, and not the engine."""
    if not isinstance(error, SpecexecError):
        traceback.print_exception(error)
