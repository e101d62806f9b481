"""What every session is: models opened once, and one text after another from them.

A session turns a prompt into tokens, hands them to the kind of session that has the models, and
turns the tokens that come into text, with stop strings and statistics. Where the models are, in
this process or in workers, it does not know.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import GEN_RUNNING, getgeneratorstate
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from specexec_cli.config import (
    BenchMethod,
    GenerationConfig,
    Method,
    SamplingConfig,
    TreeConfig,
)
from specexec_cli.core import GenerationStats, PassProgress, StepResult
from specexec_cli.device import peak_ram_bytes
from specexec_cli.drafting.calibration import Reliability
from specexec_cli.drafting.classifier import Classifier, load_classifier
from specexec_cli.drafting.iteration_cost import CostModel
from specexec_cli.drafting.learned import Learned, pair_folder
from specexec_cli.errors import ConfigError, clear_shortage
from specexec_cli.loading import Prepared
from specexec_cli.models.text import TextStream
from specexec_cli.sampling import Constraint
from specexec_cli.session.encoding import PromptEncoder
from specexec_cli.session.identity import text_identity

Steps = Generator[StepResult, None, None]

_KEPT_STATS = 1024  # of the last generations
_CLOSED = "this session is closed: open another"
_ENDED = (
    "this generation has ended: its session went on to something else, and it does one thing at a "
    "time. Finish a text first, or open a second session"
)
_BUSY = (
    "this session is in the middle of a pass for another generation, and it does one thing at a "
    "time: wait for the pass to end, or open a second session"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation as it was asked for, every default filled in and checked."""

    prompt: tuple[int, ...]
    max_tokens: int  # at most the room that the context window leaves behind the prompt
    stop: tuple[str, ...]
    sampling: SamplingConfig
    tree: TreeConfig
    method: Method | BenchMethod
    continuation: list[int]  # the tokens that will come, for the policy oracle
    constraint: Constraint | None = None
    top_logprobs: int | None = None


class TextSession(PromptEncoder, ABC):
    """A target, its tokenizer and what the session remembers from one generation to the next.

    Args:
        found: names, files and decisions.
        window: most tokens of prompt and text together that the target's positions cover.
        settings: the offload tier, device and dtype that were chosen where the user left the
            choice to us, and what else a kind of session has decided.
    """

    def __init__(self, found: Prepared, window: int, settings: Mapping[str, str]) -> None:
        super().__init__(found.tokenizer, found.pair.target.name)
        self._found = found
        self.pair = found.pair
        self.settings = settings
        self.eos_ids = found.eos_ids
        self.vocab_size = int(found.config.vocab_size)  # tokens that the target knows
        self.layers = int(found.config.num_hidden_layers)  # decoder layers of the target
        self.ssd_share = found.decision.ssd_share  # of a pass's streamed bytes, from the SSD
        self.context_limit: int | None = None  # the user's own, below the target's window
        self.context: list[int] = []  # prompt and committed tokens of the last generation
        self.stats = GenerationStats()  # of the last generation
        self.history: list[GenerationStats] = []  # of all that have ended
        # about the pair, by all generations so far
        self.learned = Learned(self.classifier, self.cost_prior)
        self._window = window
        self.link_bytes_per_s: float | None = None  # probed, where one link feeds every pass
        self._running: Steps | None = None  # the one generation that may go on
        self._closed = False

    @property
    @abstractmethod
    def method(self) -> BenchMethod:
        """The method that is used unless a generation names another."""

    @abstractmethod
    def on_layer(self, callback: Callable[[PassProgress], None]) -> None:
        """Calls back after each target layer that runs in this process, for live status.

        An exception from the callback ends the pass and comes out of generate(); the caches stay
        right.
        """

    @abstractmethod
    def draft_logits(self, tokens: Sequence[int], first: int) -> Tensor:
        """The draft model's half of `score`."""

    @abstractmethod
    def forget(self) -> None:
        """Empties the caches: the next prompt is run from its first token."""

    @abstractmethod
    def _check_method(self, method: Method | BenchMethod, tree: TreeConfig) -> None:
        """Makes sure that this session can decode so.

        Raises:
            ConfigError: it cannot; says what can.
            CheckpointError: the tree's policy is disco, and its classifier cannot be used.
        """

    @abstractmethod
    def _steps(self, request: GenerationRequest) -> Steps:
        """Decodes; nothing happens before the first step is asked for."""

    @abstractmethod
    def _target_logits(self, tokens: Sequence[int], first: int) -> Tensor:
        """The target's half of `score`."""

    @abstractmethod
    def _close(self) -> None:
        """Gives back what this kind of session holds; called once."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and text together."""
        return min(self._window, self.context_limit or self._window)

    @property
    def pair_folder(self) -> Path:
        """Where what is learned about this target and draft model is kept."""
        assert self.pair.draft is not None
        return pair_folder(self.pair.target.weights, self.pair.draft.weights)

    def classifier(self) -> Classifier:
        """The classifier of the policy disco that was trained for this pair.

        Raises:
            CheckpointError: there is none, or none that can be used; says how to train one.
        """
        assert self.pair.draft is not None
        return load_classifier(self.pair_folder, self.pair.target.repo, self.pair.draft.repo)

    def text_identity(self) -> str:
        """One word for all that texts follow from besides prompt, sampling and limits."""
        return text_identity(self._found)

    def cost_prior(self) -> CostModel | None:
        """What is known of the cost of iterations before the first one: nothing.

        It is asked for within a generation, when its first tree is about to be sized.
        """
        return None

    @property
    def reliability(self) -> Reliability:
        """How right the acceptance probabilities of the last generation were."""
        return Reliability()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingConfig | None = None,
        tree: TreeConfig | None = None,
        generation: GenerationConfig | None = None,
        method: Method | BenchMethod | None = None,
        continuation: Sequence[int] = (),
        constraint: Constraint | None = None,
        top_logprobs: int | None = None,
    ) -> Steps:
        """Yields tokens and text as they are committed; `step.text` is what may be shown.

        A generation begins when its first step is asked for. A session runs one at a time: where
        another has begun since, the older one has ended, and asking it for a step is an error.
        Closing a generation early (Ctrl-C) keeps the caches right: the next one reuses them.

        Args:
            prompt: text, or tokens.
            method: the session's own unless told otherwise.
            continuation: the tokens that will come, which the policy oracle must be told.
            constraint: which tokens may follow, such as a grammar's; it belongs to this text.
            top_logprobs: steps tell how probable their tokens were, and so many others.
        Raises:
            ConfigError: an empty prompt, one that does not fit the context window, or a method
                that is not this session's; at a step, another generation has taken its place,
                or the constraint cannot be followed.
            CheckpointError: the tree's policy is disco, and its classifier cannot be used.
            StreamError, NonFiniteLogitsError, OutOfMemoryError: a pass failed.
            WorkerError: no worker is left that could run one.
        """
        return self._generation(
            self.checked(
                self.encode(prompt) if isinstance(prompt, str) else prompt,
                generation or GenerationConfig(),
                sampling=sampling or SamplingConfig(),
                tree=tree or self.pair.tree,
                method=method or self.method,
                continuation=list(continuation),
                constraint=constraint,
                top_logprobs=top_logprobs,
            )
        )

    def checked(
        self, prompt: Sequence[int], generation: GenerationConfig, **rest: Any
    ) -> GenerationRequest:
        """A generation as it will be, limits of the context window applied; nothing begins.

        Args:
            rest: the other fields of GenerationRequest.
        Raises:
            ConfigError, CheckpointError: see `generate`.
        """
        request = GenerationRequest(
            prompt=tuple(prompt),
            max_tokens=min(generation.max_tokens, self._room(prompt)),
            stop=generation.stop,
            **rest,
        )
        self._check_method(request.method, request.tree)
        return request

    def _room(self, tokens: Sequence[int]) -> int:
        """How many tokens of text the context window leaves behind a prompt.

        Raises:
            ConfigError: the prompt cannot be continued.
        """
        if not tokens:
            raise ConfigError("the prompt is empty: give at least one token to continue from")
        rows = self.vocab_size
        unknown = next((token for token in tokens if not 0 <= token < rows), None)
        if unknown is not None:
            raise ConfigError(
                f"the prompt has token {unknown} but the target knows only {rows}: "
                "its tokenizer belongs to another model"
            )
        room = self.context_length - len(tokens)
        if room < 1:
            raise ConfigError(
                f"the prompt has {len(tokens)} tokens, the context window holds "
                f"{self.context_length} and one must be left for the text: shorten the prompt"
            )
        return room

    def _generation(self, request: GenerationRequest) -> Steps:
        """Adds text to the steps, ends at a stop string, keeps the statistics."""
        steps = self._steps(request)
        self._end_generation()
        self._running = steps
        self.context = list(request.prompt)
        self.stats = stats = GenerationStats(
            prompt_tokens=len(request.prompt), link_bytes_per_s=self.link_bytes_per_s
        )
        stream = TextStream(self.tokenizer, request.prompt, request.stop)
        started = time.perf_counter()
        try:
            with clear_shortage("it ran out while tokens were drafted or chosen"):
                for plain in steps:
                    step = with_text(plain, stream)
                    self.context += step.tokens
                    self._count(step, time.perf_counter() - started)
                    yield step
                    if step.finish_reason:
                        return
                    if self._running is not steps:
                        raise ConfigError(_CLOSED if self._closed else _ENDED)
        finally:
            self.history.append(stats)
            del self.history[:-_KEPT_STATS]  # a server's session goes on for months
            if self._running is steps:
                self._end_generation()

    def _end_generation(self) -> None:
        """Ends the generation that is under way, if one is: the caches are free for what follows.

        Raises:
            ConfigError: the session is closed, or in the middle of a pass, of which a callback or
                another thread asks this.
        """
        if self._closed:
            raise ConfigError(_CLOSED)
        if self._running is None:
            return
        if getgeneratorstate(self._running) == GEN_RUNNING:
            raise ConfigError(_BUSY)
        self._running.close()
        self._running = None

    def _count(self, step: StepResult, elapsed_s: float) -> None:
        count_step(self.stats, step, elapsed_s)

    def score(self, tokens: Sequence[int], first: int) -> tuple[Tensor, Tensor]:
        """What target and draft model predict at each position of a text from `first` on.

        It ends a generation that is under way.

        Args:
            first: at least 1 and below len(tokens).
        Returns:
            Logits, (len(tokens) - first, vocab) each; the vocabularies may differ in padding.
        Raises:
            ConfigError: there is no draft model.
        """
        draft_logits = self.draft_logits(tokens, first)
        return self._target_logits(tokens, first), draft_logits

    def close(self) -> None:
        """Gives threads, processes, files and memory back; idempotent."""
        if not self._closed:
            self._closed, self._running = True, None
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def count_step(stats: GenerationStats, step: StepResult, elapsed_s: float) -> None:
    """Accounts for a step that ended so many seconds after its generation began."""
    if stats.target_passes == 0:
        stats.ttft_s = elapsed_s
        stats.first_tokens = len(step.tokens)
        stats.prompt_rows = step.pending_rows
    stats.add(step)
    stats.total_s = elapsed_s
    stats.peak_ram_bytes = peak_ram_bytes()


def with_text(step: StepResult, stream: TextStream) -> StepResult:
    """The step with the text that its tokens release, cut behind a stop string."""
    pieces = []
    for token in step.tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    if stream.stopped:
        count = len(pieces)
        step = replace(step, tokens=step.tokens[:count], drafted=step.drafted[:count],
                       logprobs=step.logprobs[:count], finish_reason="stop")  # fmt: skip
    elif step.finish_reason:
        pieces[-1] += stream.finish()
        if stream.stopped:
            step = replace(step, finish_reason="stop")
    return replace(step, text="".join(pieces), pieces=tuple(pieces))
