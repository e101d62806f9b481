"""The base class of all sessions: models are opened once and then write one text after another.

This class turns a prompt into tokens, and the tokens of the reply into text, with stop strings and
statistics. Subclasses have the models, in this process or in workers, and decode.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import GEN_RUNNING, getgeneratorstate
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from specexec_cli.catalog.architectures import why_no_longer
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
from specexec_cli.models.makers_sampling import MakersSampling, makers_sampling
from specexec_cli.models.text import TextStream
from specexec_cli.sampling import Constraint
from specexec_cli.session.encoding import PromptEncoder
from specexec_cli.session.identity import text_identity

Steps = Generator[StepResult, None, None]

_KEPT_STATS = 1024  # most generations in `history`
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
    """The settings of one generation, checked and with all defaults filled in."""

    prompt: tuple[int, ...]
    max_tokens: int  # no more than fit into the context window behind the prompt
    stop: tuple[str, ...]
    sampling: SamplingConfig
    tree: TreeConfig
    method: Method | BenchMethod
    constraint: Constraint | None = None
    top_logprobs: int | None = None


class TextSession(PromptEncoder, ABC):
    """A target, its tokenizer, and what one generation leaves for the next.

    Args:
        found: the pair's names and files, and the decisions about them.
        window: most tokens of prompt and text together that the target's positions cover.
        settings: the offload tier, device and dtype that were chosen where the user left them to
            us, and other decisions of a kind of session.
    """

    def __init__(self, found: Prepared, window: int, settings: Mapping[str, str]) -> None:
        super().__init__(found.tokenizer, found.pair.target.name)
        self._found = found
        self.pair = found.pair
        self.settings = settings
        self.eos_ids = found.eos_ids
        self.vocab_size = int(found.config.vocab_size)  # tokens that the target knows
        self.layers = int(found.config.num_hidden_layers)  # decoder layers of the target
        self.ssd_share = found.decision.ssd_share  # share of a pass's streamed bytes from the SSD
        self.context_limit: int | None = None  # a limit of the user's, below the target's window
        self.context: list[int] = []  # prompt and committed tokens of the last generation
        self.stats = GenerationStats()  # statistics of the last generation
        self.history: list[GenerationStats] = []  # statistics of generations that have ended
        # knowledge about the pair from all generations so far
        self.learned = Learned(self.classifier, self.cost_prior)
        self._window = window
        self.link_bytes_per_s: float | None = None  # probed rate of the link that feeds all passes
        self._running: Steps | None = None  # the only generation that may go on
        self._closed = False

    @cached_property
    def makers_sampling(self) -> MakersSampling:
        """How the target's makers sample; `generate` uses it only if it is told to.

        Raises:
            CheckpointError: their file is not a JSON object.
        """
        return makers_sampling(self._found.target)

    @property
    @abstractmethod
    def method(self) -> BenchMethod:
        """The method that is used unless a generation names another."""

    @abstractmethod
    def on_layer(self, callback: Callable[[PassProgress], None]) -> None:
        """Calls back after each target layer that runs in this process, for live status.

        Of a pass that a GPU replays, it tells of the first layer before and of the last behind.

        An exception from the callback ends the pass and is raised by generate(). The caches stay
        usable.
        """

    @abstractmethod
    def draft_logits(self, tokens: Sequence[int], first: int) -> Tensor:
        """The draft model's logits for `score`."""

    @abstractmethod
    def forget(self) -> None:
        """Empties the caches: the next prompt is run from its first token."""

    def keep_beginnings_alone(self) -> None:
        """Keeps on disk, from now on, only rows that several texts of this session begin with: of
        a file of prompts nothing else is read again."""

    def prepare(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Begins to bring back, in the background, what is kept of a text: a later prompt will
        begin like it, as the next turn of a chat that is gone on with. `generate` waits for it.

        A text that does not fit the context window is left alone, as is one of which nothing is
        kept.

        Args:
            max_tokens: most tokens of the generation that will follow.
        Raises:
            ConfigError: the prompt has a token that the target lacks.
            OutOfMemoryError: there is no memory for the rows.
        """

    @abstractmethod
    def _check_method(self, method: Method | BenchMethod, tree: TreeConfig) -> None:
        """Checks that this session can decode with this method and tree.

        Raises:
            ConfigError: it cannot; the message names methods or policies that can be used.
            CheckpointError: the tree's policy is disco, and its classifier cannot be used.
        """

    @abstractmethod
    def _steps(self, request: GenerationRequest) -> Steps:
        """Yields the steps of decoding, which begins when the first step is requested."""

    @abstractmethod
    def _target_logits(self, tokens: Sequence[int], first: int) -> Tensor:
        """The target's logits for `score`."""

    @abstractmethod
    def _close(self) -> None:
        """Ends and frees what the subclass holds; called once."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and text together."""
        return min(self._window, self.context_limit or self._window)

    @property
    def pair_folder(self) -> Path:
        """The folder that keeps what is learned about this target and draft model."""
        assert self.pair.draft is not None
        return pair_folder(self.pair.target.weights, self.pair.draft.weights)

    def classifier(self) -> Classifier:
        """The policy disco's classifier, as trained for this pair.

        Raises:
            CheckpointError: there is no usable classifier; the message says how to train one.
        """
        assert self.pair.draft is not None
        return load_classifier(self.pair_folder, self.pair.target.repo, self.pair.draft.repo)

    def text_identity(self) -> str:
        """A hash of everything, besides prompt, sampling and limits, that texts depend on."""
        return text_identity(self._found)

    def cost_prior(self) -> CostModel | None:
        """An estimate of an iteration's cost before the first one; here None, for no estimate.

        It is requested during a generation, when the first tree's size is chosen.
        """
        return None

    @property
    def reliability(self) -> Reliability:
        """How well the last generation's predicted acceptance probabilities came true."""
        return Reliability()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingConfig | None = None,
        tree: TreeConfig | None = None,
        generation: GenerationConfig | None = None,
        method: Method | BenchMethod | None = None,
        constraint: Constraint | None = None,
        top_logprobs: int | None = None,
    ) -> Steps:
        """Yields tokens and text as they are committed; `step.text` is the text to show.

        A generation begins when its first step is requested. A session runs one generation at a
        time: beginning another one ends the first, and requesting a further step of the first is an
        error. After an early end (Ctrl-C) the caches stay usable, and the next generation reuses
        them.

        Args:
            prompt: text, or tokens.
            method: the session's own method if None. Those that SpecExec is measured against, such
                as chain, are known once specexec_cli.lab.baselines is imported.
            constraint: decides which tokens may follow, such as a grammar's; not used for any other
                text.
            top_logprobs: steps then tell the log-probabilities of their tokens and of this many
                of the most probable tokens.
        Raises:
            ConfigError: the prompt is empty or does not fit the context window, or this session
                cannot use the method; at a step, another generation has begun, or the constraint
                cannot be followed.
            CheckpointError: the tree's policy is disco, and its classifier cannot be used.
            StreamError, NonFiniteLogitsError, OutOfMemoryError: a pass failed.
            WorkerError: all workers that could run a pass are lost.
        """
        return self._generation(
            self.checked(
                self.encode(prompt) if isinstance(prompt, str) else prompt,
                generation or GenerationConfig(),
                sampling=sampling or SamplingConfig(),
                tree=tree or self.pair.tree,
                method=method or self.method,
                constraint=constraint,
                top_logprobs=top_logprobs,
            )
        )

    def checked(
        self, prompt: Sequence[int], generation: GenerationConfig, **rest: Any
    ) -> GenerationRequest:
        """Checks a generation and limits it to the context window; begins nothing.

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
        """Number of tokens that fit into the context window behind a prompt.

        Raises:
            ConfigError: the prompt is empty, too long, or has a token that the target lacks.
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
            known = why_no_longer(self._found.config.to_dict())
            raise ConfigError(
                f"the prompt has {len(tokens)} tokens, the context window holds "
                f"{self.context_length} and one must be left for the text"
                f"{f' ({known})' if known else ''}: shorten the prompt"
            )
        return room

    def _generation(self, request: GenerationRequest) -> Steps:
        """Adds text to the steps, ends at a stop string, and keeps statistics."""
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
            del self.history[:-_KEPT_STATS]  # a server's session may run for months
            if self._running is steps:
                self._end_generation()

    def _end_generation(self) -> None:
        """Ends the running generation, if any, so that the caches are free.

        Raises:
            ConfigError: the session is closed, or this was called in the middle of a pass, by a
                callback or another thread.
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
        """The target's and the draft model's logits for each token of a text from `first` on.

        A running generation is ended.

        Args:
            first: index of the first predicted token, at least 1 and below len(tokens).
        Returns:
            two tensors of (len(tokens) - first, vocab); the vocabularies may differ in padding.
        Raises:
            ConfigError: there is no draft model.
        """
        draft_logits = self.draft_logits(tokens, first)
        return self._target_logits(tokens, first), draft_logits

    def close(self) -> None:
        """Ends threads and processes, closes files and frees memory; idempotent."""
        if not self._closed:
            self._closed, self._running = True, None
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def count_step(stats: GenerationStats, step: StepResult, elapsed_s: float) -> None:
    """Adds a step to the statistics; it ended `elapsed_s` seconds after the generation began."""
    if stats.target_passes == 0:
        stats.ttft_s = elapsed_s
        stats.first_tokens = len(step.tokens)
        stats.prompt_rows = step.pending_rows
    stats.add(step)
    stats.total_s = elapsed_s
    stats.peak_ram_bytes = peak_ram_bytes()


def with_text(step: StepResult, stream: TextStream) -> StepResult:
    """The step with the text that its tokens release, without tokens after a stop string."""
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
