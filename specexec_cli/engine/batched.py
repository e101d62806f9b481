"""The engine that runs several texts at once: each pass carries all of them side by side.

Texts are admitted, cancelled and ended between passes, in the engine's own thread. Texts without a
free seat wait in the order in which they were asked for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from specexec_cli.core import GenerationStats, PassProgress, StepResult
from specexec_cli.decoding.batch import Batch, BatchText
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.forest import Forest
from specexec_cli.engine.queued import Cancelled, QueuedEngine, tell_bug
from specexec_cli.engine.text import Running, TextRequest, lasting
from specexec_cli.errors import SpecexecError, clear_shortage
from specexec_cli.models.text import TextStream
from specexec_cli.planning.memory import nodes_of_a_text
from specexec_cli.sampling import Sampler
from specexec_cli.session.local_session import LocalSession
from specexec_cli.session.text_session import GenerationRequest, count_step, with_text


@dataclass(slots=True, eq=False)
class _Text:
    """A text under way: the caller's view of it, the batch's, and its stream of characters."""

    running: Running
    batched: BatchText
    stream: TextStream


class Batched(QueuedEngine[GenerationRequest]):
    """Runs up to `slots` texts at once in a thread of its own.

    Until the engine is closed, only it may use the session.

    Args:
        session: with memory planned for `slots` texts.
        slots: most texts at once.
        most_waiting: most texts that wait while `slots` are under way.
    Raises:
        ConfigError: the session's policy cannot size the trees of several texts.
    """

    def __init__(self, session: LocalSession, *, slots: int, most_waiting: int) -> None:
        self._session = session
        self._seats = session.seats(slots)
        self._model = self._seats[0].target.model
        self._batch = Batch(self._forest(slots), self._seats, session.kept)
        self._texts: list[_Text] = []  # under way, the oldest first
        self._passes = self._tokens = 0
        self._began = (0.0, 0)  # time and bytes streamed at the first layer of the pass
        self._model.on_layer = self._on_layer
        super().__init__(slots=slots, most_waiting=most_waiting)

    def _forest(self, slots: int) -> Forest | None:
        drafter, session = self._seats[0].drafter, self._session
        if drafter is None:
            return None
        model = drafter.rows.model if isinstance(drafter, ModelDrafter) else None
        return Forest(model, session.pair.tree, slots, session.learned)

    def _checked(self, request: TextRequest) -> GenerationRequest:
        session = self._session
        return session.checked(
            request.prompt, request.generation, sampling=request.sampling, tree=session.pair.tree,
            method=session.method, constraint=request.constraint,
            top_logprobs=request.top_logprobs,
        )  # fmt: skip

    def _under_way(self) -> list[Running]:
        return [text.running for text in self._texts]

    def _counts(self) -> tuple[int, int, int]:
        return self._passes, self._tokens, self._model.bytes_streamed

    def _leave(self, running: Running) -> None:
        if self._session.kept is not None:
            for text in self._texts:
                if text.running is running:
                    seat = text.batched.seat
                    self._session.kept.offer(seat.target, seat.drafter, ended=True)
        self._texts = [text for text in self._texts if text.running is not running]

    def close(self) -> None:
        """See Engine.close."""
        super().close()
        self._model.on_layer = lambda index: None

    def _serve(self) -> None:
        while True:
            if not self._texts:
                self._session.quiet.pause()
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._texts or self._closed)
                self._drop_cancelled()
                gone = [each for each in self._under_way() if self._closed or each.cancelled]
            for running in gone:
                self._end(running, "cancelled")
            if self._closed:
                return
            self._admit()
            if self._texts:
                self._session.quiet.begin()
                self._pass()

    def _admit(self) -> None:
        """Gives free seats to the texts that have waited longest."""
        if not self._texts:
            self._seats[0].target.recover()
        with self._changed:
            while self._queue and len(self._texts) < self._slots:
                running, request = self._queue.popleft()
                try:
                    self._texts.append(self._begun(running, request))
                except Exception as error:
                    tell_bug(error)
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
        """Runs one pass, and delivers each text's tokens or error."""
        texts = list(self._texts)
        asked_before, held_before = self._session.experts_counted()
        try:
            with clear_shortage("it ran out while tokens were drafted or chosen"):
                outcomes = self._batch.step([text.batched for text in texts])
        except Cancelled:
            return
        except Exception as error:
            tell_bug(error)
            self._failing = lasting(error)
            for text in texts:
                self._end(text.running, "failed", error)
            return
        self._passes += 1
        self._failing = None
        asked, held = self._session.experts_counted()
        carried = [text for text in texts if text.batched.carried]
        for text in carried:  # each is counted an equal share, as of the pass's bytes
            text.running.stats.experts_asked += (asked - asked_before) // len(carried)
            text.running.stats.experts_held += (held - held_before) // len(carried)
        for text, outcome in zip(texts, outcomes, strict=True):
            if isinstance(outcome, SpecexecError):
                self._end(text.running, "failed", outcome)
            elif outcome is not None:
                try:
                    self._deliver(text, outcome)
                except Exception as error:
                    tell_bug(error)
                    self._end(text.running, "failed", error)

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
            self._end(text.running, step.finish_reason)

    def _on_layer(self, index: int) -> None:
        """Updates every text's progress; leaves the pass if all of its texts are cancelled."""
        texts = self._texts
        if self._closed or (texts and all(text.running.cancelled for text in texts)):
            raise Cancelled
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
