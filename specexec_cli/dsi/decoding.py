"""Decodes one text with a DSI pool, and yields steps as every decoding method does."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from specexec_cli.config import SamplingConfig
from specexec_cli.core import FinishReason, StepResult
from specexec_cli.dsi.engine import judge
from specexec_cli.dsi.messages import Score, Workers
from specexec_cli.dsi.orchestrator import Orchestrator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ModelWorkers(Workers, Protocol):
    """A pool of workers with real models."""

    def configure(
        self, sampling: SamplingConfig, rejection: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        """Tells every worker how the next generation draws its tokens; see messages.Configure."""
        ...

    def end(self, tokens: Sequence[int]) -> None:
        """Tells every worker the text that a generation has ended with."""
        ...

    def forget(self) -> None:
        """Has every worker empty its cache."""
        ...

    def score(self, worker: int, order: Score, timeout_s: float) -> NDArray[np.float32]:
        """Asks one worker for logits, between generations, and waits for them.

        Args:
            worker: its number.
            order: the text, and the first position wanted.
            timeout_s: longest wait.
        Returns:
            (len(order.tokens) - order.first, vocab).
        Raises:
            WorkerError: the worker is lost, or gives no answer in time.
            SpecexecError: its pass failed.
        """
        ...


def dsi(
    workers: ModelWorkers,
    orchestrator: Orchestrator,
    sampling: SamplingConfig,
    prompt: Sequence[int],
    max_tokens: int,
    eos_ids: Collection[int],
    drafts: bool = True,
    rejection: bool = False,
) -> Iterator[StepResult]:
    """Yields one StepResult per commit until an EOS token or `max_tokens`.

    Drafting and verification overlap, so a step's verify_s is the time since the step before it,
    and its draft_s is 0. The orchestrator counts the bytes; a step's are 0.

    Args:
        workers: the pool.
        orchestrator: of that pool.
        sampling: how the target's tokens are drawn.
        prompt: at least one token.
        max_tokens: most tokens to decode, at least 1.
        eos_ids: tokens that end the text.
        drafts: False for plain decoding, token after token by one target server.
        rejection: whether drafts are kept by rejection sampling; has no effect on greedy decoding.
    """
    rejection = rejection and sampling.temperature > 0.0
    workers.configure(sampling, rejection, prompt)
    text = list(prompt)
    left, since = max_tokens, time.perf_counter()
    decide = partial(judge, sampling.seed) if rejection else None
    commits = orchestrator.generate(prompt, max_tokens, drafts, decide)
    try:
        for commit in commits:
            ends = [i + 1 for i, token in enumerate(commit.tokens) if token in eos_ids]
            tokens = commit.tokens[: ends[0]] if ends else commit.tokens
            left -= len(tokens)
            text += tokens
            finish: FinishReason | None = "eos" if ends else "length" if left == 0 else None
            now = time.perf_counter()
            drafted = commit.drafted[: len(tokens)]
            yield StepResult(
                tokens=tokens,
                drafted=drafted,
                tree_nodes=sum(drafted),
                tree_depth=sum(drafted),
                draft_s=0.0,
                verify_s=now - since,
                bytes_streamed=0,
                pending_rows=commit.pending_rows if left + len(tokens) == max_tokens else 1,
                finish_reason=finish,
            )
            since = now
            if finish:
                return
    finally:
        commits.close()
        workers.end(text)
